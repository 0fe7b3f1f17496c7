"""Adapters as PEFT saves them, drawn at random, and the checkpoints that they make of a model when they are merged."""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "inference_mode": True,
    "bias": "none",
    "lora_alpha": 8,
    "lora_dropout": 0.1,
    "use_dora": False,
    "use_rslora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "init_lora_weights": True,
    "fan_in_fan_out": False,
}


def write_adapter(
    folder: Path,
    checkpoint: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    linears: Sequence[str] = LINEARS,
    size: float = 0.3,
    **config: Any,
) -> Path:
    """Factors for these layers of a checkpoint, whose product is about `size`; returns the folder."""
    draw = torch.Generator().manual_seed(seed)
    settings = CONFIG | {"r": rank, "target_modules": list(linears)} | config
    factors = {}
    for name, weight_OI in load_file(checkpoint / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(tuple(linears)):
            num_outputs, num_inputs = weight_OI.shape
            a_RI, b_OR = (
                torch.randn(shape, generator=draw) * math.sqrt(size / rank / scale_of(settings))
                for shape in ((rank, num_inputs), (num_outputs, rank))
            )
            factors[module] = a_RI, b_OR
    return write_factors(folder, factors, **settings)


def write_factors(folder: Path, factors: Mapping[str, tuple[Tensor, Tensor]], **config: Any) -> Path:
    """These factors A and B, by layer, with scale 1 unless the config says otherwise; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = len(next(iter(factors.values()))[0])
    tensors = {
        f"base_model.model.{module}.lora_{name}.weight": factor
        for module, pair in factors.items()
        for name, factor in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = CONFIG | {"r": rank, "lora_alpha": rank} | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def scale_of(config: dict[str, Any]) -> float:
    """alpha / r, or alpha / sqrt(r)."""
    return float(config["lora_alpha"]) / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])


def write_merged(folder: Path, checkpoint: Path, adapter: Path) -> Path:
    """The checkpoint whose weights are W + scale B A, computed in float64; returns the folder."""
    shutil.copytree(checkpoint, folder)
    weights = load_file(checkpoint / "model.safetensors")
    factors = load_file(adapter / "adapter_model.safetensors")
    scale = scale_of(json.loads((adapter / "adapter_config.json").read_text()))
    for name in [name for name in factors if ".lora_A." in name]:
        weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
        b_OR, a_RI = factors[name.replace(".lora_A.", ".lora_B.")].double(), factors[name].double()
        weights[weight] = (weights[weight].double() + scale * (b_OR @ a_RI)).float()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder

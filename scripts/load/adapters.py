"""Adapters (LoRA) with factors drawn at random, for all linear layers of a model, as folders that PEFT would read.

    cd scripts && python -m load.adapters MODEL FOLDER --count 8 --rank 16

Each is FOLDER/a0, FOLDER/a1, ... One that is there is left as it is.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from aserve.models.checkpoint import resolve_checkpoint
from aserve.models.inspection import native_tensors
from aserve.models.spec import read_spec


def write_adapter(folder: Path, model: str, rank: int, seed: int) -> None:
    """Factors of all linear layers, so small that answers stay what they are."""
    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    targets = set[str]()
    for name, dims in native_tensors(read_spec(resolve_checkpoint(model).config)):
        if name.endswith("_proj.weight"):
            module = name.removesuffix(".weight")
            targets.add(module.rpartition(".")[2])
            num_outputs, num_inputs = (dim.size for dim in dims)
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, num_inputs, generator=draw) * 0.01
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(num_outputs, rank, generator=draw) * 0.01
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": sorted(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def write_adapters(folder: Path, model: str, rank: int, count: int) -> dict[str, Path]:
    """So many, by name."""
    made = {f"a{number}": folder / f"a{number}" for number in range(count)}
    for number, path in enumerate(made.values()):
        if not path.exists():
            write_adapter(path, model, rank, number)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    write_adapters(options.folder, options.model, options.rank, options.count)


if __name__ == "__main__":
    main()

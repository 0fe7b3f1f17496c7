"""Checkpoints that come quantized: each format gives the bits of the model that it stands for, or is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aserve.core.config import Options
from aserve.core.errors import CheckpointError
from aserve.models import dequantize
from aserve.models.checkpoint import resolve_checkpoint
from aserve.models.inspection import inspect, read_headers
from aserve.models.quantized_formats import quantized_weights
from aserve.models.sharding import Shard
from aserve.models.spec import read_spec
from aserve.models.weights import Part, SafetensorsWeights
from aserve.telling import describe_weights
from aserve.weight_plan import plan_weights
from tests.checkpoints import write_checkpoint
from tests.models.quantizing import CASES, write_quantized
from tests.models.test_loader import load, logits

pytestmark = pytest.mark.torch
NAME = "model.layers.0.mlp.down_proj.weight"
GPTQ = CASES["gptq"]


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    return write_checkpoint(folder, request.param, hidden_size=64, intermediate_size=96)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return write_checkpoint(folder, "llama", hidden_size=64, intermediate_size=96)


def changed(folder: Path, change: Callable[[dict[str, Tensor]], None] | None = None, **config: Any) -> Path:
    """A quantized checkpoint, with other tensors or another quantization_config."""
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
    path = folder / "config.json"
    given = json.loads(path.read_text())
    given["quantization_config"] |= config
    path.write_text(json.dumps(given))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_model_that_it_stands_for(source, tmp_path, case):
    stand_for = write_quantized(source, tmp_path / "quantized", CASES[case])
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "config.json").write_text((source / "config.json").read_text())
    save_file(stand_for, dense / "model.safetensors")
    assert torch.equal(logits(load(tmp_path / "quantized")), logits(load(dense)))


@pytest.mark.parametrize("case", CASES)
def test_pieces_and_shares_of_ranks_are_those_of_the_whole(llama, tmp_path, monkeypatch, case):
    whole = write_quantized(llama, tmp_path / "quantized", CASES[case])[NAME]
    monkeypatch.setattr(dequantize, "PIECE", 96)
    checkpoint = resolve_checkpoint(str(tmp_path / "quantized"))
    quantized = quantized_weights(checkpoint.config, read_headers(checkpoint))
    for part, expected in ((None, whole), (Part(0, 24), whole[24:48]), (Part(1, 36), whole[:, 36:72])):
        out = torch.full(expected.shape, 7.0)
        with SafetensorsWeights(
            checkpoint.weight_files, torch.float32, out.device, lambda *_: None, None, Shard(0, 2), quantized
        ) as weights:
            assert weights.shape(NAME) == whole.shape
            weights.fill(out, NAME, part)
        assert torch.equal(out, expected)


def test_what_is_planned_and_told_is_what_is_loaded(llama, tmp_path):
    write_quantized(llama, tmp_path / "quantized", CASES["packed"])
    options = Options(model="")
    of_packed, of_dense = (
        plan_weights(checkpoint, read_spec(checkpoint.config), options)
        for checkpoint in (resolve_checkpoint(str(tmp_path / "quantized")), resolve_checkpoint(str(llama)))
    )
    assert of_packed.memory_bytes == of_dense.memory_bytes
    assert of_packed.num_parameters == of_dense.num_parameters
    assert of_packed.file_bytes < of_dense.file_bytes
    told = describe_weights(options, resolve_checkpoint(str(tmp_path / "quantized")))
    assert told.endswith(" of weights (compressed-tensors, 4 bits)")


def test_a_head_that_nobody_needs_may_be_left_over(tmp_path):
    """Of a model whose table is its head, quantized or not."""
    folder = write_checkpoint(tmp_path / "tied", "llama_tied", hidden_size=64, intermediate_size=96)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    write_quantized(folder, tmp_path / "quantized", GPTQ)
    expected = logits(load(tmp_path / "quantized"))
    head = {f"lm_head.{end}": part for end, part in GPTQ.quantize(table.float())[0].items()}
    assert torch.equal(logits(load(changed(tmp_path / "quantized", lambda tensors: tensors.update(head)))), expected)


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return named(f"no {name}", lambda tensors: tensors.__delitem__(name))


def put(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return named(name, lambda tensors: tensors.update({name: make(tensors[name]).contiguous()}))


def named(name: str, change: Callable[[dict[str, Tensor]], None]) -> Callable[[dict[str, Tensor]], None]:
    """By which pytest calls it."""
    change.__name__ = name
    return change


LAYER = "model.layers.0.mlp.down_proj"
"""From 96 inputs to 64 outputs."""


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("gptq", drop(f"{LAYER}.qzeros"), rf"tensor {LAYER}.qzeros is missing, which gptq has"),
        ("gptq", put(f"{LAYER}.scales", lambda t: t[1:]), r"scales is \[5, 64\], but gptq, 4 bits asks for \[6, 64\]"),
        ("gptq", put(f"{LAYER}.scales", lambda t: t.int()), "scales has dtype I32, not one of F32, F16, BF16"),
        ("gptq", put(f"{LAYER}.qweight", lambda t: t.flatten()), "qweight has 1 dimensions, not 2"),
        ("gptq", put(f"{LAYER}.qweight", lambda t: t.long()), "qweight has dtype I64, not one of I32"),
        ("gptq", put(f"{LAYER}.g_idx", lambda t: t + 1), "g_idx has groups other than 0 to 5"),
        ("gptq", put(f"{LAYER}.g_idx", lambda t: t - 1), "g_idx has groups other than 0 to 5"),
        (
            "gptq",
            put(f"{LAYER}.bias", lambda t: t + 1),
            "no place for model.layers.0.mlp.down_proj.bias, which is not all",
        ),
        ("gptq", put(f"{LAYER}.scales", lambda t: t * torch.nan), f"tensor {NAME} has values that are not finite"),
        ("packed", put(f"{LAYER}.weight_scale", lambda t: t[:, 1:]), r"weight_scale is \[64, 5\], not \[64, 6\]"),
        ("packed", drop(f"{LAYER}.weight_scale"), "weight_scale is missing, which compressed-tensors has"),
        ("int8", drop(f"{LAYER}.weight_scale"), "weight_scale is missing, which compressed-tensors has"),
        (
            "float8 of blocks",
            put(f"{LAYER}.weight_scale_inv", lambda t: t[1:]),
            r"no scales of \[64, 96\] by \[20, 12\]",
        ),
        (
            "float8 of blocks",
            put(f"{LAYER}.weight_scale_inv", lambda t: t[None]),
            "weight_scale_inv is .* no scales of",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(llama, tmp_path, case, change, message):
    write_quantized(llama, tmp_path / "quantized", CASES[case])
    with pytest.raises(CheckpointError, match=message):
        load(changed(tmp_path / "quantized", change))


@pytest.mark.parametrize(
    ("case", "config", "message"),
    [
        (
            "gptq",
            {"quant_method": "bitsandbytes"},
            "quant_method 'bitsandbytes' is not read; these are: gptq, awq, comp",
        ),
        ("gptq", {"quant_method": 5}, "quant_method must be a string, got 5"),
        ("gptq", {"bits": 3}, "bits 3 is not read; these are: 2, 4, 8"),
        ("gptq", {"bits": None}, "quantization_config.bits is missing"),
        ("gptq", {"bits": 8}, r"asks for|but the config asks"),
        ("gptq", {"group_size": 0}, "group_size must be -1 or positive, got 0"),
        ("gptq", {"group_size": 32}, r"scales is \[\d, \d+\], but gptq, 4 bits asks for"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not read; these are: gptq, gptq_v2"),
        ("awq", {"version": "gemv"}, "version 'gemv' is not read; these are: gemm"),
        ("awq", {"zero_point": False}, "zero_point False is not read; these are: True"),
        ("awq", {"bits": 8}, "bits 8 is not read; these are: 4"),
        ("packed", {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized' is not read; these are: pack-q"),
        ("packed", {"config_groups": {}}, "config_groups must have weights of one kind, found 0"),
        ("packed", {"config_groups": []}, "config_groups must be objects by name, got"),
        ("packed", {"config_groups": {"a": {"weights": None}}}, "config_groups.a.weights must be an object, got None"),
        ("packed", {"transform_config": {"config_groups": {}}}, "transform_config is not read"),
        ("packed", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is not read"),
        ("int8", {"format": "pack-quantized"}, "q_proj.weight has dtype I8, not one of"),
        ("float8 of blocks", {"weight_block_size": [128, 0]}, "weight_block_size must be two positive integers"),
        ("float8 of blocks", {"weight_block_size": None}, "which are no scales of"),
    ],
)
def test_formats_that_are_not_read_are_refused(llama, tmp_path, case, config, message):
    write_quantized(llama, tmp_path / "quantized", CASES[case])
    checkpoint = resolve_checkpoint(str(changed(tmp_path / "quantized", **config)))
    with pytest.raises(CheckpointError, match=message):
        inspect(checkpoint)


def test_a_model_of_transformers_is_refused(checkpoints, tmp_path):
    source = checkpoints("phi")
    write_quantized(source, tmp_path / "quantized", GPTQ)
    with pytest.raises(
        CheckpointError, match="weights of gptq, 4 bits are not read for PhiForCausalLM: it runs through"
    ):
        inspect(resolve_checkpoint(str(tmp_path / "quantized")))

"""From folder to model: which way it is loaded, what it costs to import, and folders that do not fit together."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aserve.core.errors import CheckpointError, ConfigError
from aserve.kernels.reference import ReferenceOps
from aserve.models.checkpoint import resolve_checkpoint
from aserve.models.inspection import inspect
from aserve.models.interface import CausalLM
from aserve.models.llama import Llama
from aserve.models.loader import load_model, read_dtype
from tests.checkpoints import write_checkpoint
from tests.models.paged import PagedSequences

pytestmark = pytest.mark.torch

TOKENS = [5, 6, 7, 300, 1]


def load(folder: Path, **options: Any) -> CausalLM:
    checkpoint = resolve_checkpoint(str(folder))
    inspect(checkpoint, dummy=options.get("load_format") == "dummy")
    return load_model(checkpoint, device="cpu", ops=ReferenceOps(), **options)


def logits(model: CausalLM) -> torch.Tensor:
    return PagedSequences(model).run([(0, TOKENS)])[0]


def copy_with_tensors(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def copy_config(source: Path, target: Path, **changes: Any) -> Path:
    target.mkdir()
    config = json.loads((source / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_a_native_model_is_aserves_own_and_knows_its_spec(checkpoints):
    model = load(checkpoints("llama"))
    assert isinstance(model, Llama)
    assert (model.spec.num_layers, model.spec.head_dim, model.spec.context_len) == (2, 8, 512)


def test_shards_give_the_same_model_and_report_progress(checkpoints, tmp_path):
    folder = write_checkpoint(tmp_path / "sharded", "llama", max_shard_size="40KB")
    seen: list[tuple[str, int, int]] = []
    model = load(folder, progress=lambda *step: seen.append(step))
    files = resolve_checkpoint(str(folder)).weight_files
    assert len(files) > 2
    total = sum(file.stat().st_size for file in files)
    assert (seen[0], seen[-1]) == (("weights", 0, total), ("weights", total, total))
    assert seen == sorted(seen)
    assert len(seen) > 10
    assert torch.equal(logits(model), logits(load(checkpoints("llama"))))


def test_a_tied_head_may_be_in_the_file_or_not(checkpoints, tmp_path):
    folder = checkpoints("llama_tied")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    embedding = "model.embed_tokens.weight"
    twice = copy_with_tensors(folder, tmp_path / "twice", lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
    assert torch.equal(logits(load(twice)), logits(load(folder)))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda t: t.pop("model.norm.weight"), r"has no tensor model\.norm\.weight"),
        (lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"), r"no tensor model\.layers\.1\.self_attn\.k_proj"),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(47, 32)}),
            r"tensor model\.layers\.0\.mlp\.up_proj\.weight is \[47, 32\], but the config asks for \[48, 32\]",
        ),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(48, 32)}),
            r"no place for 1 tensors of the checkpoint: model\.layers\.2",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}),
            r"no place for 1 tensors of the checkpoint: model\.layers\.0\.self_attn\.q_proj\.bias",
        ),
    ],
)
def test_weights_that_do_not_fit_the_config_are_named(checkpoints, tmp_path, change, line):
    folder = copy_with_tensors(checkpoints("llama"), tmp_path / "copy", change)
    with pytest.raises(CheckpointError, match=line):
        load(folder)


def test_a_config_alone_needs_dummy_weights(checkpoints, tmp_path):
    folder = copy_config(checkpoints("qwen3"), tmp_path / "config")
    with pytest.raises(CheckpointError, match=r"no \.safetensors weights"):
        load(folder)
    first, again, other = (logits(load(folder, load_format="dummy", seed=seed)) for seed in (1, 1, 2))
    assert first.abs().min() > 0
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_layer_that_a_config_names_beyond_the_last_is_no_number_of_layers(checkpoints, tmp_path):
    source = checkpoints("qwen3")
    folder = copy_config(source, tmp_path / "copy", max_window_layers=1000)
    (folder / "model.safetensors").symlink_to("weights")
    (folder / "weights").write_bytes((source / "model.safetensors").read_bytes())
    assert load(folder).spec.windows == (None, None)


def test_a_context_is_refused_unless_less_of_it_is_asked_for(checkpoints, tmp_path):
    folder = copy_config(checkpoints("llama"), tmp_path / "config", max_position_embeddings=2**24, head_dim=4096)
    checkpoint = resolve_checkpoint(str(folder))
    with pytest.raises(CheckpointError, match=r"makes a rope table of 274877906944 bytes; .* set --max-model-len"):
        inspect(checkpoint, dummy=True)
    inspect(checkpoint, dummy=True, max_model_len=2048)
    with pytest.raises(ConfigError, match="max_model_len 16777217 is over the model's context of 16777216 tokens"):
        inspect(checkpoint, dummy=True, max_model_len=2**24 + 1)


@pytest.mark.parametrize(
    ("config", "wish", "expected"),
    [
        ({"dtype": "bfloat16"}, "auto", torch.bfloat16),
        ({"torch_dtype": "float16"}, "auto", torch.float16),
        ({"torch_dtype": "float32"}, "auto", torch.float32),
        ({}, "auto", torch.float32),
        ({"dtype": "bfloat16"}, "float32", torch.float32),
    ],
)
def test_the_type_is_the_wish_or_the_checkpoints(checkpoints, tmp_path, config, wish, expected):
    folder = copy_config(checkpoints("llama"), tmp_path / "config", **{"dtype": None, **config})
    assert read_dtype(resolve_checkpoint(str(folder)), wish) == expected


def test_an_unknown_type_is_refused(checkpoints, tmp_path):
    folder = copy_config(checkpoints("llama"), tmp_path / "config", dtype="int4")
    with pytest.raises(CheckpointError, match="dtype 'int4' is not one of float32, float16, bfloat16"):
        load(folder, load_format="dummy")


NATIVE_START = """
import sys, torch
from aserve.kernels.reference import ReferenceOps
from aserve.models.checkpoint import resolve_checkpoint
from aserve.models.loader import load_model
load_model(resolve_checkpoint(sys.argv[1]), device="cpu", ops=ReferenceOps())
print(*sorted({"transformers", "huggingface_hub", "triton"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_a_native_model_loads_without_transformers(checkpoints):
    result = subprocess.run(
        [sys.executable, "-c", NATIVE_START, str(checkpoints("llama"))], check=True, capture_output=True, text=True
    )
    assert result.stdout == "\n"

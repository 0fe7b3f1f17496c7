"""Adapters' folders: what fits is read as it is meant, and what does not is refused by name before memory is taken."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aserve.core.errors import AdapterError
from aserve.kernels.reference import ReferenceOps
from aserve.models.lora import LoraLayers
from aserve.models.peft import WEIGHTS_FILE, Module, PeftReader, inspect_adapter
from tests.adapters import write_factors

pytestmark = pytest.mark.torch
LAYER = "model.layers.0.self_attn"
Q, K, O = f"{LAYER}.q_proj", f"{LAYER}.k_proj", f"{LAYER}.o_proj"
MODULES = {Q: Module(6, 8), K: Module(6, 4), O: Module(8, 6)}


def factors(rank: int = 2) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return {
        name: (
            torch.randn(rank, module.num_inputs, generator=draw),
            torch.randn(module.num_outputs, rank, generator=draw),
        )
        for name, module in MODULES.items()
    }


def new_layers(max_rank: int = 16) -> LoraLayers:
    layers = LoraLayers(2, max_rank, ReferenceOps(), torch.float32, torch.device("cpu"))
    layers.new_layer({Q: 8, K: 4}, 6)
    layers.new_layer({O: 6}, 8)
    layers.allocate()
    return layers


@pytest.mark.parametrize(("is_rank_stabilized", "scale"), [(False, 3.0), (True, 3.0 * 2**0.5)])
def test_factors_lie_in_a_slot_as_kernels_read_them(tmp_path: Path, is_rank_stabilized: bool, scale: float) -> None:
    """Fused layers' parts side by side, what an adapter leaves out as zeros, the scale in B; a slot at a time."""
    given = factors()
    del given[K]
    layers = new_layers()
    folder = write_factors(tmp_path, given, lora_alpha=6, use_rslora=is_rank_stabilized)
    layers.put(1, layers.read(inspect_adapter(folder, layers.modules, 16)))
    assert layers.modules == MODULES
    for layer in layers._layers:
        weights = layer.weights
        assert weights is not None
        assert weights.ranks_G.tolist() == [0, 2]
        assert not weights.a_GPIR[0].any()
        for name, a_IR, b_RO in zip(
            layer.outputs, weights.a_GPIR[1], weights.b_GRO[1].split(weights.sizes, 1), strict=True
        ):
            product_IO = a_IR @ b_RO
            expected_IO = torch.zeros_like(product_IO)
            if name in given:
                a_RI, b_OR = given[name]
                expected_IO = scale * (b_OR @ a_RI).t()
            torch.testing.assert_close(product_IO, expected_IO)


def test_a_slot_keeps_nothing_of_the_adapter_before(tmp_path: Path) -> None:
    layers = new_layers()
    only_o = {O: factors()[O]}
    for rank, given in ((16, factors(16)), (2, only_o)):
        folder = write_factors(tmp_path / str(rank), given)
        layers.put(0, layers.read(inspect_adapter(folder, layers.modules, 16)))
    weights = layers._layers[0].weights
    assert weights is not None
    assert not weights.a_GPIR[0].any()
    assert not weights.b_GRO[0].any()
    assert weights.ranks_G.tolist() == [2, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_any_type_of_float_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    given = {name: (a.to(dtype), b.to(dtype)) for name, (a, b) in factors().items()}
    layers = new_layers()
    layers.put(0, layers.read(inspect_adapter(write_factors(tmp_path, given), layers.modules, 16)))
    assert layers._layers[1].weights is not None
    torch.testing.assert_close(layers._layers[1].weights.a_GPIR[0, 0, :, :2], given[O][0].float().t())


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, r"peft_type must be LORA, got 'IA3'"),
    ({"r": 17}, r"r must be an integer in \[1, 16\] \(max_lora_rank\), got 17"),
    ({"r": 10**30}, "r must be an integer"),
    ({"r": 0}, "r must be an integer"),
    ({"r": True}, "r must be an integer"),
    ({"r": "2"}, "r must be an integer .* got '2'"),
    ({"r": None}, "r must be an integer"),
    ({"lora_alpha": None}, "lora_alpha must be a number"),
    ({"lora_alpha": 1e300}, "lora_alpha must be a number"),
    ({"use_rslora": 1}, "use_rslora must be true or false, got 1"),
    ({"bias": "all"}, "bias must be none, got 'all'"),
    ({"bias": "lora_only"}, "bias must be none"),
    ({"use_dora": True}, "'use_dora' is not supported, and it is True"),
    ({"modules_to_save": ["lm_head"]}, "'modules_to_save' is not supported"),
    ({"rank_pattern": {"q_proj": 4}}, "'rank_pattern' is not supported"),
    ({"alpha_pattern": {"q_proj": 4}}, "'alpha_pattern' is not supported"),
    ({"fan_in_fan_out": True}, "'fan_in_fan_out' is not supported"),
    ({"layer_replication": [[0, 2]]}, "'layer_replication' is not supported"),
    ({"trainable_token_indices": [1]}, "'trainable_token_indices' is not supported"),
    ({"target_parameters": ["x"]}, "'target_parameters' is not supported"),
    ({"lora_bias": True}, "'lora_bias' is not supported"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changes the base model"),
    ({"init_lora_weights": ["x"]}, "init_lora_weights"),
    ({"of_next_year": 7}, "'of_next_year' is not supported, and it is 7"),
]


@pytest.mark.parametrize(("config", "message"), CONFIGS, ids=str)
def test_what_would_be_ignored_is_refused_by_name(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    folder = write_factors(tmp_path, factors(), **config)
    with pytest.raises(AdapterError, match=f"adapter_config.json: {message}") as caught:
        inspect_adapter(folder, MODULES, 16)
    assert "\n" not in str(caught.value)


def with_tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return write


def named(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Path], None]:
    return with_tensors(lambda tensors: tensors.update({name: torch.zeros(shape, dtype=dtype)}))


def linked_out(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.rename(folder.parent / "elsewhere.safetensors")
    path.symlink_to(folder.parent / "elsewhere.safetensors")


def headed(header: dict[str, Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        raw = json.dumps(header).encode()
        (folder / "adapter_model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)

    return write


BASE = "base_model.model."
FOLDERS: list[tuple[str, Callable[[Path], object], str]] = [
    ("embeddings", named(f"{BASE}model.embed_tokens.lora_embedding_A", 2, 9), "embeddings or the output head"),
    ("output head", named(f"{BASE}lm_head.lora_A.weight", 2, 6), "embeddings or the output head"),
    ("whole module", named(f"{BASE}lm_head.weight", 9, 6), "embeddings or the output head"),
    ("DoRA", named(f"{BASE}{Q}.lora_magnitude_vector", 8), "is DoRA's"),
    ("another layer", named(f"{BASE}model.layers.9.self_attn.q_proj.lora_A.weight", 2, 6), "no place in this model"),
    ("another kind", named(f"{BASE}{Q}.lora_C.weight", 2, 6), "no place in this model"),
    ("shape of A", named(f"{BASE}{Q}.lora_A.weight", 2, 7), r"is \[2, 7\], but rank and model ask for \[2, 6\]"),
    ("shape of B", named(f"{BASE}{Q}.lora_B.weight", 2, 8), r"is \[2, 8\], but rank and model ask for \[8, 2\]"),
    ("rank", named(f"{BASE}{Q}.lora_A.weight", 3, 6), r"is \[3, 6\], but"),
    ("type", named(f"{BASE}{Q}.lora_A.weight", 2, 6, dtype=torch.int32), "dtype I32"),
    ("twice", named(f"{Q}.lora_A.weight", 2, 6), "is there twice"),
    ("one factor", with_tensors(lambda t: t.pop(f"{BASE}{Q}.lora_B.weight")), "has lora_A and not the other"),
    ("nothing", with_tensors(dict.clear), "has no tensor"),
    ("no weights", lambda f: (f / "adapter_model.safetensors").unlink(), "there is no adapter_model.safetensors"),
    (
        "pickle",
        lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"),
        "there is no adapter_model",
    ),
    ("no config", lambda f: (f / "adapter_config.json").unlink(), "there is no adapter_config.json"),
    ("no JSON", lambda f: (f / "adapter_config.json").write_text("{"), "is no JSON object"),
    ("a list", lambda f: (f / "adapter_config.json").write_text("[1]"), "is no JSON object"),
    ("deep", lambda f: (f / "adapter_config.json").write_text("[" * 100_000), "is no JSON object"),
    ("long", lambda f: (f / "adapter_config.json").write_text(" " * (1 << 21)), "at most 1048576 are read"),
    ("a link", linked_out, "a link that leads out of the folder"),
    ("a pipe", lambda f: ((f / "adapter_config.json").unlink(), os.mkfifo(f / "adapter_config.json")), "there is no"),
    ("cut", lambda f: os.truncate(f / "adapter_model.safetensors", 100), "not readable as safetensors"),
    (
        "huge",
        headed({f"{BASE}{Q}.lora_A.weight": {"dtype": "F32", "shape": [2**40, 6], "data_offsets": [0, 24 * 2**40]}}),
        "not readable as safetensors",
    ),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in FOLDERS], ids=[case[0] for case in FOLDERS])
def test_a_folder_that_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    folder = write_factors(tmp_path / "adapter", factors())
    change(folder)
    with pytest.raises(AdapterError, match=message) as caught:
        inspect_adapter(folder, MODULES, 16)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_looked_into_is_refused_in_one_line(tmp_path: Path) -> None:
    """Catches what the system says to a name that is too long, or of a folder that nobody may enter, as a fault."""
    with pytest.raises(AdapterError, match=r"/a{300}: cannot be read: File name too long$"):
        inspect_adapter(tmp_path / ("a" * 300), MODULES, 16)


def test_values_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    """In the model's type, with the scale: what fits a checkpoint may be too large for it."""
    layers = new_layers()
    for value in (float("nan"), float("inf"), 1e38):
        given = factors()
        given[K][1][3, 1] = value
        folder = inspect_adapter(write_factors(tmp_path, given, lora_alpha=9000), MODULES, 16)
        with pytest.raises(AdapterError, match=r"k_proj.lora_B.weight has values that are not finite in float32"):
            layers.read(folder)


def fill_all(reader: PeftReader, rank: int) -> None:
    for name, module in MODULES.items():
        reader.fill(name, torch.empty(module.num_inputs, rank), torch.empty(rank, module.num_outputs))


def test_a_file_that_shrinks_while_it_is_read_is_an_error_of_its_adapter(tmp_path: Path) -> None:
    """Catches a file that is mapped into memory: where another is copied over it, the process ended by SIGBUS."""
    folder = inspect_adapter(write_factors(tmp_path, factors()), MODULES, 16)
    path = tmp_path / WEIGHTS_FILE
    reader = PeftReader(folder)
    os.truncate(path, path.stat().st_size // 2)
    changed = pytest.raises(AdapterError, match="the file has changed while it was read")
    with reader, changed:
        fill_all(reader, folder.rank)
    with pytest.raises(AdapterError, match="not readable as safetensors"):
        PeftReader(folder)


def test_links_within_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    write_factors(folder, factors())
    blobs.mkdir()
    for path in list(folder.iterdir()):
        target = blobs / path.name
        path.rename(target)
        path.symlink_to(target)
    assert inspect_adapter(folder, MODULES, 16).rank == 2

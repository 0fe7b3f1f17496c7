"""Reading shards: every tensor once, in its place, or one line that says which is wrong."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from aserve.core.errors import CheckpointError
from aserve.models.headers import read_header
from aserve.models.layers import DenseMethod, LinearShape
from aserve.models.weights import RandomWeights, SafetensorsWeights

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def write(path: Path, **tensors: Tensor) -> Path:
    save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, path)
    return path


def reader(*files: Path, dtype: torch.dtype = torch.float32, log: list | None = None) -> SafetensorsWeights:
    seen = [] if log is None else log
    return SafetensorsWeights(files, dtype, CPU, lambda *step: seen.append(step))


def read(weights: SafetensorsWeights, name: str, *shape: int) -> Tensor:
    out = weights.empty(*shape)
    weights.fill(out, name)
    return out


def test_tensors_come_from_whichever_shard_has_them_and_bytes_are_counted(tmp_path):
    a, b, c = torch.randn(2, 3), torch.randn(4), torch.randn(1, 1)
    log: list = []
    files = write(tmp_path / "1", a=a, b=b), write(tmp_path / "2", c=c)
    with reader(*files, log=log) as weights:
        assert torch.equal(read(weights, "b", 4), b)
        assert torch.equal(read(weights, "c", 1, 1), c)
        assert torch.equal(read(weights, "a", 2, 3), a)
        weights.finish()
    total = sum(file.stat().st_size for file in files)
    assert log == [("weights", done, total) for done in (0, b.nbytes, b.nbytes + c.nbytes, 44, total)]


def test_fused_layers_are_stacked_in_the_order_asked_for(tmp_path):
    tensors: Mapping[str, Tensor] = {
        "k__weight": torch.randn(2, 3),
        "k__bias": torch.randn(2),
        "q__weight": torch.randn(4, 3),
        "q__bias": torch.randn(4),
    }
    with reader(write(tmp_path / "1", **tensors)) as weights:
        linear = DenseMethod().load(weights, LinearShape({"q": 4, "k": 2}, 3, bias=True))
        weights.finish()
    x = torch.randn(5, 3)
    parts = [x @ tensors[f"{n}__weight"].T + tensors[f"{n}__bias"] for n in "qk"]
    torch.testing.assert_close(linear(x), torch.cat(parts, dim=-1))


def test_values_are_converted_to_the_models_type(tmp_path):
    a = torch.randn(5)
    with reader(write(tmp_path / "1", a=a), dtype=torch.bfloat16) as weights:
        assert torch.equal(read(weights, "a", 5), a.bfloat16())


@pytest.mark.parametrize(
    ("name", "shape", "line"),
    [
        ("b", (2, 3), r"the checkpoint has no tensor b"),
        ("a", (3, 2), r"tensor a is \[2, 3\], but the config asks for \[3, 2\]"),
        ("ids", (2,), r"tensor ids is of type torch\.int64"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, name, shape, line):
    file = write(tmp_path / "1", a=torch.randn(2, 3), ids=torch.tensor([1, 2]))
    with reader(file) as weights, pytest.raises(CheckpointError, match=line):
        read(weights, name, *shape)


def test_what_is_left_over_is_named_apart_from_what_follows_from_the_config(tmp_path):
    known = {"model__layers__0__self_attn__rotary_emb__inv_freq": torch.zeros(1), "lm_head__weight": torch.zeros(1)}
    with reader(write(tmp_path / "1", **known)) as weights:
        weights.skip("lm_head.weight")
        weights.finish()
    with (
        reader(write(tmp_path / "2", extra=torch.zeros(1), **known)) as weights,
        pytest.raises(CheckpointError, match=r"no place for 2 tensors of the checkpoint: extra, lm_head\.weight"),
    ):
        weights.finish()


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    files = [write(tmp_path / name, a=torch.zeros(1)) for name in "12"]
    with pytest.raises(CheckpointError, match="tensor a is in 1 too"):
        reader(*files)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, (1 << 40).to_bytes(8, "little") + b"{}"])
def test_a_file_that_is_no_safetensors_is_refused(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="not readable as safetensors"):
        reader(path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"1234567", "it has 7 bytes"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
            "a pointer of Git LFS; git lfs pull",
        ),
        (b"\xff" * 100, f"its header claims {2**64 - 1} bytes; 92 are there or allowed"),
        ((3).to_bytes(8, "little") + b"{}", "its header claims 3 bytes; 2 are there or allowed"),
    ],
    ids=["none", "pointer", "huge", "one byte over"],
)
def test_a_header_that_is_not_there_is_not_read(tmp_path, content, why):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=why):
        read_header(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_weights_depend_on_the_seed_alone_and_norms_are_near_one(dtype):
    def draw(seed: int) -> tuple[Tensor, Tensor]:
        weights = RandomWeights(dtype, CPU, seed)
        matrix, norm = weights.empty(100, 100), weights.empty(100)
        weights.fill(matrix, "model.layers.0.mlp.down_proj.weight")
        weights.fill(norm, "model.norm.weight")
        return matrix, norm

    (matrix, norm), again, other = draw(0), draw(0), draw(1)
    assert torch.equal(matrix, again[0])
    assert not torch.equal(matrix, other[0])
    assert matrix.float().std().item() == pytest.approx(0.02, rel=0.1)
    assert norm.float().mean().item() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_finite_is_named(tmp_path, number, dtype):
    with (
        reader(write(tmp_path / "1", a=torch.tensor([1.0, number, 2.0])), dtype=dtype) as weights,
        pytest.raises(CheckpointError, match=r"tensor a has values that are not finite in .*16|tensor a .* float32"),
    ):
        read(weights, "a", 3)


def test_values_that_the_type_cannot_hold_are_named_and_a_sum_that_it_cannot_hold_is_none_of_them(tmp_path):
    file = write(tmp_path / "1", large=torch.tensor([1e5]), many=torch.full((10,), 6e4))
    with reader(file, dtype=torch.float16) as weights:
        assert read(weights, "many", 10).sum().isinf()
        with pytest.raises(CheckpointError, match=r"tensor large .* not finite in float16; see --dtype"):
            read(weights, "large", 1)


def test_a_tensor_without_memory_is_refused():
    with pytest.raises(CheckpointError, match=r"no memory for a tensor of \[1099511627776, 1048576\]"):
        RandomWeights(torch.float32, CPU, seed=0).empty(2**40, 2**20)

"""Our own product on a CPU, in every variant that this processor can run, against torch's in float64."""

import mmap
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aserve.kernels.native import native_linear
from aserve.kernels.native.library import Library
from aserve.kernels.native.native_linear import NativeLinear, can_be_native
from aserve.kernels.native.native_ops import NativeOps
from aserve.kernels.native.weight_memory import WeightMemory
from aserve.models.layers import DenseMethod, LinearShape, NativeMethod, PackingMethod
from aserve.models.loader import linear_method
from aserve.models.weights import RandomWeights
from tests.kernels.cases import native_ops

pytestmark = pytest.mark.torch

MAX_ROWS = 513
SHAPES = ((1, 1), (7, 3), (64, 128), (65, 129), (300, 96), (330, 1001), (600, 70))
"""Outputs and inputs: below, at and above a panel, a group of panels, a run and a pair."""
ROUNDING = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2**-8, 1e-5)}
"""Relative and absolute: an output is rounded once, to its type."""


@pytest.fixture(params=[(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)], ids=str)
def dtype(request, monkeypatch) -> Iterator[torch.dtype]:
    """Each type, bfloat16 in both ways to multiply it; and torch's number of threads as it was."""
    dtype, is_intel = request.param
    monkeypatch.setattr(native_linear, "is_intel", lambda: is_intel)
    num_threads = torch.get_num_threads()
    yield dtype
    torch.set_num_threads(num_threads)


def tensors(shape: tuple[int, int], dtype: torch.dtype, num_rows: int = MAX_ROWS) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, bias and rows, for outputs around 1."""
    torch.manual_seed(0)
    weight_OI = (torch.randn(shape) / shape[1] ** 0.5).to(dtype)
    return weight_OI, torch.randn(shape[0]).to(dtype), torch.randn(num_rows, shape[1]).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_torchs_but_for_rounding(variant_library: Library, dtype, shape):
    """Ends of panels, runs, tiles and pairs that are forgotten or counted twice."""
    torch.set_num_threads(1)
    weight_OI, bias_O, x_TI = tensors(shape, dtype)
    rtol, atol = ROUNDING[dtype]
    for bias in (None, bias_O):
        layer = NativeLinear(variant_library, WeightMemory(), weight_OI, bias)
        expected_TO = F.linear(x_TI.double(), weight_OI.double(), None if bias is None else bias.double())
        for num_rows in (1, 6, 7, 16, 97, MAX_ROWS):
            out_TO = layer(x_TI[:num_rows])
            assert out_TO.dtype == dtype
            torch.testing.assert_close(out_TO.double(), expected_TO[:num_rows], rtol=rtol, atol=atol)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_among_any_others_on_any_threads(variant_library: Library, dtype, shape):
    """Sums that depend on the size of a tile, on a row's place or on who computes it."""
    weight_OI, bias_O, x_TI = tensors(shape, dtype)
    layer = NativeLinear(variant_library, WeightMemory(), weight_OI, bias_O)
    torch.set_num_threads(1)
    together_TO = layer(x_TI)
    for num_threads, all_num_rows in (
        (1, (*range(1, 14), 32, 95, 97, 193, 400)),
        (2, (1, 7, 97, MAX_ROWS)),
        (3, (5, 40)),
    ):
        torch.set_num_threads(num_threads)
        for num_rows in all_num_rows:
            rows = slice(7 * num_rows % (MAX_ROWS - num_rows + 1), None)
            assert torch.equal(layer(x_TI[rows][:num_rows]), together_TO[rows][:num_rows]), (num_threads, num_rows)


@pytest.mark.parametrize("shape", [(128, 129), (640, 96), (896, 300)], ids=str)
def test_gates_have_the_bits_of_the_operation_behind_the_product(variant_library: Library, dtype, shape):
    """Catches a gate of another panel, a bias of the wrong half, and sums that are gated before they are rounded."""
    weight_OI, bias_O, x_TI = tensors(shape, dtype)
    ops = NativeOps(variant_library)
    for bias, num_threads in ((None, 1), (bias_O, 1), (bias_O, 2), (bias_O, 3)):
        torch.set_num_threads(num_threads)
        layer = NativeLinear(variant_library, WeightMemory(), weight_OI, bias)
        gated = layer.silu_and_mul()
        assert gated is not None
        for num_rows in (0, 1, 5, 6, 16, 97, MAX_ROWS):
            x = x_TI[:num_rows]
            assert torch.equal(gated(x), ops.silu_and_mul(layer(x))), (bias is not None, num_threads, num_rows)


def test_gates_that_share_a_panel_with_what_they_gate_are_left_to_the_operation(variant_library: Library):
    panel = native_linear._panel_outputs(variant_library)
    for num_outputs, can in ((2 * panel, True), (2 * panel + 2, False), (panel, False), (3 * panel, False)):
        layer = NativeLinear(variant_library, WeightMemory(), torch.ones(num_outputs, 8))
        assert (layer.silu_and_mul() is not None) == can


def test_what_is_not_finite_stays_in_its_row(variant_library: Library, dtype):
    """Rows that share a register; weights of 0 that fill a panel or a pair up, times infinity."""
    weight_OI, _, x_TI = tensors((70, 131), dtype, 9)
    layer = NativeLinear(variant_library, WeightMemory(), weight_OI)
    clean_TO = layer(x_TI)
    x_TI[2, 5], x_TI[6, 130], x_TI[8, 0] = float("nan"), float("inf"), float("-inf")
    out_TO = layer(x_TI)
    assert out_TO[2].isnan().all()
    assert out_TO[[6, 8]].isinf().all()
    others = [0, 1, 3, 4, 5, 7]
    assert torch.equal(out_TO[others], clean_TO[others])


def test_rows_and_numbers_may_lie_apart(variant_library: Library, dtype):
    """A step from row to row that is taken to be the number of inputs."""
    weight_OI, _, wide_TI = tensors((40, 300), dtype, 20)
    layer = NativeLinear(variant_library, WeightMemory(), weight_OI[:, :90])
    for x_TI in (wide_TI[:, 7:97], wide_TI[::2, :90], wide_TI[:, ::3][:, :90], wide_TI.t()[:90].t()):
        assert torch.equal(layer(x_TI), layer(x_TI.contiguous()))
    assert layer(wide_TI[:0, :90]).shape == (0, 40)


@pytest.mark.parametrize("shape", [(1, 1), (65, 129), (300, 96)], ids=str)
def test_rows_of_the_weight_come_back(variant_library: Library, dtype, shape):
    table_VE, _, _ = tensors(shape, dtype)
    layer = NativeLinear(variant_library, WeightMemory(), table_VE)
    ids_T = torch.randint(shape[0], (200,))
    assert torch.equal(layer.embed(ids_T), table_VE[ids_T])
    assert layer.embed(ids_T[:0]).shape == (0, shape[1])
    ids_T[[3, 50]] = torch.tensor([-1, shape[0]])
    rows_TE = layer.embed(ids_T)
    assert rows_TE[[3, 50]].isnan().all(), "memory that is not the weight's was read"
    assert torch.equal(rows_TE[4:50], table_VE[ids_T[4:50]])


def test_the_weight_is_held_once(dtype):
    method = NativeMethod(native_ops().library)
    table_VE = torch.randn(70, 30).to(dtype)
    plain = weakref.ref(table_VE)
    embed, head = method.tie(table_VE)
    expected_TE = table_VE[[69, 0]]
    del table_VE
    assert plain() is None
    assert torch.equal(embed(torch.tensor([69, 0])), expected_TE)
    assert head(expected_TE).shape == (2, 70)


def test_layers_are_loaded_as_the_dense_are():
    shape = LinearShape({"a": 60, "b": 70}, 102, bias=True)
    native, dense = (
        method.load(RandomWeights(torch.float32, torch.device("cpu"), seed=1), shape)
        for method in (NativeMethod(native_ops().library), DenseMethod())
    )
    x_TI = torch.randn(3, 102)
    torch.testing.assert_close(native(x_TI), dense(x_TI), rtol=1e-5, atol=1e-5)


def test_half_precision_stays_with_torch():
    ops = native_ops()
    assert isinstance(ops, NativeOps)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert type(linear_method(ops, dtype, torch.device("cpu"))) is (
            NativeMethod if can_be_native(dtype) else PackingMethod
        )
    assert not can_be_native(torch.float16)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_weights_share_chunks_of_huge_pages_and_never_bytes():
    """Weights on top of each other; one larger than a chunk; a chunk that stays when its weights have gone."""
    memory = WeightMemory()
    shapes = [(3, 5), (1000, 1000), (1, 1), (4096, 5000), (7, 9)]
    weights = [memory.empty(shape, torch.float32).fill_(i) for i, shape in enumerate(shapes)]
    for i, (weight, shape) in enumerate(zip(weights, shapes, strict=True)):
        assert weight.shape == shape
        assert weight.data_ptr() % 64 == 0
        assert (weight == i).all()
    assert weights[0].data_ptr() % (2 << 20) == 0
    assert weights[2].data_ptr() - weights[1].data_ptr() == 4_000_000
    assert memory.scratch(9, 9, dtype=torch.bfloat16).data_ptr() == memory.scratch(4, dtype=torch.float32).data_ptr()
    memory.scratch(1000, 1000, dtype=torch.float32).fill_(9)
    assert all((weight == i).all() for i, weight in enumerate(weights))
    before = resident_bytes()
    del weights, weight, memory
    assert before - resident_bytes() > 50_000_000

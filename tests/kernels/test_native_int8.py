"""Our own int8 product on a CPU, in every variant that this processor can run, against its twin: to the bit."""

import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aserve.core.errors import ConfigError
from aserve.kernels.cpu import CpuOps
from aserve.kernels.native.int8_linear import Int8Linear
from aserve.kernels.native.library import Library
from aserve.kernels.native.native_ops import NativeOps
from aserve.kernels.native.weight_memory import WeightMemory
from aserve.kernels.reference import ReferenceOps
from aserve.kernels.reference_int8 import RUN, int8_linear, quantize
from aserve.models.layers import LinearShape
from aserve.models.loader import linear_method
from aserve.models.quantized import Int8Method
from aserve.models.weights import RandomWeights
from tests.kernels.cases import native_ops

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")

MAX_ROWS = 200
GROUPS = (0, 32, 128)
SHAPES = ((1, 1), (7, 3), (64, 128), (65, 129), (130, 1030), (70, 31))
"""Outputs and inputs: below, at and above a panel, a group, a run, a piece of sixteen and a word of four."""


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request) -> Iterator[torch.dtype]:
    """Each type; and torch's number of threads as it was."""
    num_threads = torch.get_num_threads()
    yield request.param
    torch.set_num_threads(num_threads)


def tensors(shape: tuple[int, int], dtype: torch.dtype, num_rows: int = MAX_ROWS) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, bias and rows, for outputs around 1; rows of very different sizes."""
    torch.manual_seed(0)
    weight_OI = (torch.randn(shape) / shape[1] ** 0.5).to(dtype)
    sizes_T1 = 10.0 ** torch.randint(-3, 4, (num_rows, 1))
    return weight_OI, torch.randn(shape[0]).to(dtype), (torch.randn(num_rows, shape[1]) * sizes_T1).to(dtype)


def layer_of(library: Library, weight_OI: Tensor, bias_O: Tensor | None = None, group: int = 0) -> Int8Linear:
    return Int8Linear(library, WeightMemory(), weight_OI, bias_O, group)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_its_twin_to_the_bit(variant_library: Library, dtype, shape, group):
    """Ends of panels, groups, runs, tiles, pieces and words that are forgotten or counted twice; other rounding."""
    torch.set_num_threads(1)
    weight_OI, bias_O, x_TI = tensors(shape, dtype)
    for bias in (None, bias_O):
        layer = layer_of(variant_library, weight_OI, bias, group)
        expected_TO = int8_linear(x_TI, weight_OI, bias, group)
        for num_rows in (1, 6, 7, 16, 97, MAX_ROWS):
            out_TO = layer(x_TI[:num_rows])
            assert out_TO.dtype == dtype
            assert torch.equal(out_TO, expected_TO[:num_rows]), (bias is not None, num_rows)


@pytest.mark.parametrize("group", GROUPS)
def test_gates_have_the_bits_of_the_operation_behind_the_product(variant_library: Library, dtype, group):
    weight_OI, bias_O, x_TI = tensors((640, 200), dtype)
    layer = layer_of(variant_library, weight_OI, bias_O, group)
    gated = layer.silu_and_mul()
    assert gated is not None
    for num_rows in (1, 7, MAX_ROWS):
        x = x_TI[:num_rows]
        assert torch.equal(gated(x), NativeOps(variant_library).silu_and_mul(layer(x)))


@pytest.mark.parametrize("group", GROUPS)
def test_whole_numbers_are_multiplied_exactly(variant_library: Library, group):
    """Products that wrap around or saturate: of pairs, 2 x 255 x 127 is more than 16 bits hold."""
    torch.manual_seed(0)
    num_inputs = 1024
    weight_OI, x_TI = (torch.randint(-127, 128, (n, num_inputs)).float() for n in (80, 40))
    weight_OI[0], x_TI[0], x_TI[1] = 127, 127, -127
    weight_OI[1] = -127
    weight_OI[:, ::32], x_TI[:, ::32] = 127, 127  # scales of 1
    layer = layer_of(variant_library, weight_OI, None, group)
    assert torch.equal(layer(x_TI), x_TI @ weight_OI.T)  # below 2^24


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shape", [(65, 129), (130, 1030)], ids=str)
def test_a_row_has_the_same_bits_among_any_others_on_any_threads(variant_library: Library, dtype, shape, group):
    """Sums that depend on the size of a tile, on a row's place or on who computes it."""
    weight_OI, bias_O, x_TI = tensors(shape, dtype, 300)
    layer = layer_of(variant_library, weight_OI, bias_O, group)
    torch.set_num_threads(1)
    together_TO = layer(x_TI)
    for num_threads, all_num_rows in ((1, (*range(1, 14), 32, 97, 193)), (2, (1, 7, 97, 300)), (3, (5, 40))):
        torch.set_num_threads(num_threads)
        for num_rows in all_num_rows:
            rows = slice(7 * num_rows % (len(x_TI) - num_rows + 1), None)
            assert torch.equal(layer(x_TI[rows][:num_rows]), together_TO[rows][:num_rows]), (num_threads, num_rows)


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_not_finite_stays_in_its_row(variant_library: Library, dtype, group):
    """Scales of neighbours; a row that comes out finite although it has what is not."""
    weight_OI, _, x_TI = tensors((70, 131), dtype, 9)
    layer = layer_of(variant_library, weight_OI, None, group)
    clean_TO = layer(x_TI)
    x_TI[2, 5], x_TI[6, 130], x_TI[8, 0] = float("nan"), float("inf"), float("-inf")
    out_TO = layer(x_TI)
    assert out_TO[2].isnan().all()
    assert not out_TO[[6, 8]].isfinite().any()
    others = [0, 1, 3, 4, 5, 7]
    assert torch.equal(out_TO[others], clean_TO[others])


def test_rows_and_numbers_may_lie_apart(variant_library: Library, dtype):
    """A step from row to row that is taken to be the number of inputs; rows of nothing, and none."""
    weight_OI, _, wide_TI = tensors((40, 300), dtype, 20)
    layer = layer_of(variant_library, weight_OI[:, :90], None, 32)
    for x_TI in (wide_TI[:, 7:97], wide_TI[::2, :90], wide_TI[:, ::3][:, :90], wide_TI.t()[:90].t()):
        assert torch.equal(layer(x_TI), layer(x_TI.contiguous()))
    assert layer(wide_TI[:0, :90]).shape == (0, 40)
    assert torch.equal(layer(torch.zeros(3, 90, dtype=dtype)), torch.zeros(3, 40, dtype=dtype))
    assert torch.equal(layer(torch.full((3, 90), 1e-38, dtype=dtype)), torch.zeros(3, 40, dtype=dtype))


@pytest.mark.parametrize("group", GROUPS)
def test_the_error_is_that_of_rounding_to_eight_bits(group):
    """A scale that is too large, or one in the wrong place: each factor is off by a half of its scale at most."""
    weight_OI, _, x_TI = tensors((96, 1030), torch.float32, 20)
    out_TO = layer_of(native_ops().library, weight_OI, None, group)(x_TI)
    x, weight = quantize(x_TI, group), quantize(weight_OI, group)
    size = group or 1030
    x_scales_TI, weight_scales_OI = (q.scales_RG.repeat_interleave(size, 1)[:, :1030].double() for q in (x, weight))
    x_TI, weight_OI = x_TI.double(), weight_OI.double()
    bounds_TO = (x_scales_TI @ weight_OI.abs().T + (x_TI.abs() + x_scales_TI / 2) @ weight_scales_OI.T) / 2
    errors_TO = (out_TO - x_TI @ weight_OI.T).abs()
    assert (errors_TO <= bounds_TO * 1.0001).all()
    relative = errors_TO.norm() / (x_TI @ weight_OI.T).norm()
    assert relative < {0: 0.013, 128: 0.01, 32: 0.008}[group]


def test_a_layer_is_of_the_tensors_that_are_fused():
    """Rows of a fused layer that are quantized by each other's scales; a bias that is lost."""
    shape = LinearShape({"a": 60, "b": 70}, 102, bias=True)
    layer = Int8Method(native_ops().library, 32).load(RandomWeights(torch.float32, torch.device("cpu"), seed=1), shape)
    weights = RandomWeights(torch.float32, torch.device("cpu"), seed=1)
    tensors = {}
    for name, *size in (("a.weight", 60, 102), ("a.bias", 60), ("b.weight", 70, 102), ("b.bias", 70)):
        tensors[name] = weights.empty(*size)
        weights.fill(tensors[name], name)
    x_TI = torch.randn(3, 102)
    weight_OI, bias_O = (torch.cat([tensors[f"{part}.{kind}"] for part in "ab"]) for kind in ("weight", "bias"))
    assert torch.equal(layer(x_TI), int8_linear(x_TI, weight_OI, bias_O, 32))


def test_a_tied_table_stays_as_it_is_and_the_head_is_quantized(dtype):
    method = Int8Method(native_ops().library, 0)
    table_VE = torch.randn(70, 30).to(dtype)
    embed, head = method.tie(table_VE)
    ids_T = torch.tensor([69, 0])
    assert torch.equal(embed(ids_T), table_VE[ids_T])
    assert torch.equal(head(table_VE[:4]), int8_linear(table_VE[:4], table_VE, None, 0))
    assert not torch.equal(head(table_VE[:4]), F.linear(table_VE[:4], table_VE))


@pytest.mark.parametrize(("group", "num_scales"), [(0, 4), (128, 4), (32, 16)])
def test_a_layer_takes_a_byte_a_weight_and_four_a_scale(dtype, group, num_scales):
    """Weights that are kept as they came, too; what rounding up to whole panels takes of small layers is not asked."""
    weight_OI = torch.randn(256, 512).to(dtype)
    came = weakref.ref(weight_OI)
    layer = layer_of(native_ops().library, weight_OI, None, group)
    del weight_OI
    assert came() is None
    assert layer._packed.nbytes == 256 * 512 + 256 * num_scales * 4


def test_it_is_refused_by_name_where_there_is_no_product_of_it():
    ops = native_ops()
    assert isinstance(linear_method(ops, torch.bfloat16, CPU, "int8-g32"), Int8Method)
    with pytest.raises(ConfigError, match=r"int8-g128: it needs aserve's own CPU kernels: there is no compiler"):
        linear_method(CpuOps("there is no compiler"), torch.float32, CPU, "int8-g128")
    with pytest.raises(ConfigError, match=r"quantization int8: these operations have no products of it"):
        linear_method(ReferenceOps(), torch.float32, CPU, "int8")


def test_twins_run_is_the_kernels():
    """Sums of more inputs than a float holds exactly: the twin would be no oracle."""
    assert RUN * 127 * 127 < 2**24

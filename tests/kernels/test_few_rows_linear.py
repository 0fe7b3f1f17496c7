"""Linear layers of some rows: those of torch, whole and split, and used for no others."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from aserve.kernels import triton_ops
from aserve.kernels.few_rows_linear import MAX_OUTPUTS, MAX_ROWS, choose_tile, few_rows_linear, is_few
from aserve.kernels.triton_ops import TritonOps
from tests.kernels.cases import Fast

pytestmark = pytest.mark.torch
SHAPES = [(256, 128, 2), (1024, 64, 4), (1280, 64, 8), (256, 256, 3)]
"""(inputs, outputs, processors): whole; by 3 splits of 8 tiles of inputs, and by 5 of 10; by tiles of 128 outputs."""
UNEVEN = SHAPES[1]


@pytest.fixture(params=[torch.float16, *[torch.bfloat16] * torch.cuda.is_available()], ids=str)
def triton_half(request: pytest.FixtureRequest, triton_fast: Fast) -> Fast:
    """Triton in each type that few rows may have and that it multiplies here."""
    return replace(triton_fast, dtype=request.param)


def layer(fast: Fast, num_inputs, num_outputs, num_rows):
    return fast.randn(num_rows, num_inputs), fast.randn(num_outputs, num_inputs) / num_inputs**0.5


def assert_close(fast: Fast, out_TO, x_TI, weight_OI, bias_O=None):
    expected = F.linear(x_TI.float(), weight_OI.float(), None if bias_O is None else bias_O.float())
    fast.assert_close(out_TO, expected.to(fast.dtype))


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch):
    """What is allocated for a product, each with the memory around it; NaN all over at first."""
    pairs = []
    new_empty = torch.Tensor.new_empty

    def allocate(self, shape, dtype=None, **others):
        if dtype is None:  # the interpreter's
            return new_empty(self, shape, **others)
        around = torch.full((torch.Size(shape).numel() + 2048,), torch.nan, dtype=dtype, device=self.device)
        pairs.append((around[1024:-1024].view(shape), around))
        return pairs[-1][0]

    monkeypatch.setattr(torch.Tensor, "new_empty", allocate)
    monkeypatch.setattr(torch.Tensor, "new_empty_strided", lambda x, shape, _, dtype: allocate(x, shape, dtype))
    return pairs


@pytest.mark.parametrize("num_rows", [1, 3, 16, 17, MAX_ROWS])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_that_of_torch(triton_half: Fast, shape, has_bias, num_rows):
    num_inputs, num_outputs, num_sms = shape
    x_TI, weight_OI = layer(triton_half, num_inputs, num_outputs, num_rows)
    bias_O = triton_half.randn(num_outputs) if has_bias else None
    assert_close(triton_half, few_rows_linear(x_TI, weight_OI, bias_O, num_sms), x_TI, weight_OI, bias_O)


@pytest.mark.parametrize("num_rows", [3, 17])
@pytest.mark.parametrize("shape", [SHAPES[0], UNEVEN], ids=str)
def test_nothing_but_the_rows_is_read_or_written(triton_half: Fast, allocated, shape, num_rows):
    """Rows lie apart, and NaN between and behind them; what is allocated holds it, and keeps it around them."""
    num_inputs, num_outputs, num_sms = shape
    rows_TI, weight_OI = layer(triton_half, num_inputs, num_outputs, num_rows)
    wide_TI = torch.full_like(rows_TI, torch.nan).repeat(2, 2)
    x_TI = wide_TI[:num_rows, :num_inputs].copy_(rows_TI)
    assert_close(triton_half, few_rows_linear(x_TI, weight_OI, None, num_sms), x_TI, weight_OI)
    assert len(allocated) == (1 if shape is SHAPES[0] else 2)
    for inside, around in allocated:
        assert inside.isfinite().all()
        assert around.isfinite().sum() == inside.numel()


@pytest.mark.parametrize("shape", [SHAPES[0], UNEVEN], ids=str)
def test_a_row_is_the_same_whatever_the_others_hold(triton_half: Fast, shape):
    num_inputs, num_outputs, num_sms = shape
    x_TI, weight_OI = layer(triton_half, num_inputs, num_outputs, 5)
    others_TI = triton_half.randn(5, num_inputs)
    others_TI[3] = x_TI[3]
    others_TI[4] = torch.nan
    outs = [few_rows_linear(rows_TI, weight_OI, None, num_sms)[3] for rows_TI in (x_TI, others_TI)]
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "tile_outputs", "num_splits"),
    [
        (6144, 4096, 64, 1),
        (4096, 4096, 64, 2),
        (2560, 4096, 64, 3),
        (1024, 2048, 64, 6),
        (1024, 3072, 64, 6),
        (4096, 1024, 64, 2),
        (64, 1024, 64, 4),
        (64, 128, 64, 1),
        (8448, 128, 64, 1),
        (8576, 128, 128, 1),
        (8640, 128, 64, 1),
        (19456, 2560, 128, 1),
    ],
)
def test_most_processors_have_a_program(num_outputs, num_inputs, tile_outputs, num_splits):
    """By hand, for 132: 88 programs of 64 outputs, of two tiles of 128 inputs at least; of 128 outputs, beyond 132."""
    tile, splits = choose_tile(num_outputs, num_inputs, 132)
    assert (tile.outputs, splits) == (tile_outputs, num_splits)


def test_the_tiles_of_these_shapes():
    chosen = [choose_tile(outputs, inputs, sms) for inputs, outputs, sms in SHAPES]
    assert [(tile.outputs, splits) for tile, splits in chosen] == [(64, 1), (64, 3), (64, 5), (128, 1)]


@pytest.mark.parametrize("capability", [(9, 0), (8, 0), (10, 0)], ids=str)
def test_few_rows_on_hopper_take_it_and_no_others(triton_fast: Fast, monkeypatch, capability):
    taken = []

    def noted(x_TI, *others):
        taken.append(x_TI.shape[0])
        return few_rows_linear(x_TI, *others)

    monkeypatch.setattr(triton_ops, "few_rows_linear", noted)
    ops = TritonOps(132, capability)
    for num_rows in (2, 3, MAX_ROWS, MAX_ROWS + 1):
        x_TI, weight_OI = layer(triton_fast, 256, 64, num_rows)
        bias_O = triton_fast.randn(64)
        assert_close(triton_fast, ops.linear(x_TI, weight_OI, bias_O), x_TI, weight_OI, bias_O)
    assert taken == ([3, MAX_ROWS] if capability == (9, 0) else [])


def test_other_shapes_are_left_to_cublas():
    def few(num_rows=3, num_inputs=128, num_outputs=64, dtype=torch.bfloat16):
        shapes = (num_rows, num_inputs), (num_outputs, num_inputs)
        return is_few(*(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes), 132)

    assert few()
    assert few(num_rows=MAX_ROWS, num_outputs=MAX_OUTPUTS, dtype=torch.float16)
    assert not few(num_rows=0)
    assert not few(num_rows=MAX_ROWS + 1)
    assert not few(dtype=torch.float32)
    assert not few(num_inputs=192)
    assert not few(num_outputs=96)
    assert not few(num_outputs=MAX_OUTPUTS + 64)

"""A packed linear layer gives what a dense one gives."""

from functools import partial

import pytest
import torch

from aserve.kernels import packed_linear
from aserve.kernels.packed_linear import can_pack
from aserve.models import layers
from aserve.models.layers import DenseLinear, DenseMethod, LinearShape, PackedLinear, PackingMethod, SmallLinear
from aserve.models.weights import RandomWeights

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.0), (torch.float32, 1e-5)])
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("has_amx", [False, True])
def test_packed_and_dense_agree(monkeypatch, dtype, tolerance, num_rows, bias, has_amx):
    monkeypatch.setattr(packed_linear, "has_amx", lambda: has_amx)
    torch.manual_seed(0)
    weight_OI = torch.randn(1032, 1024, dtype=dtype) / 32
    if not can_pack(weight_OI):
        pytest.skip(f"this processor has no fast packed product in {dtype}")
    bias_O = torch.randn(1032, dtype=dtype) if bias else None
    x_TI = torch.randn(num_rows, 1024, dtype=dtype)
    with torch.inference_mode():
        dense = DenseLinear(weight_OI, bias_O)(x_TI)
        small = (SmallLinear, partial(SmallLinear, packs=True)) if dtype == torch.float32 else ()
        for kind in (PackedLinear, *small):
            packed = kind(weight_OI, bias_O)(x_TI)
            torch.testing.assert_close(packed, dense, rtol=tolerance or 1.6e-2, atol=tolerance or 1e-2)


def test_float16_stays_as_it_is_and_only_small_float32_weights_are_plain():
    method = PackingMethod()
    assert isinstance(method.wrap(torch.zeros(64, 64, dtype=torch.float16)), DenseLinear)
    small_OI = torch.zeros(64, 64)  # plain, where a plain product gives a row the same bits always
    assert isinstance(method.wrap(small_OI), SmallLinear if packed_linear.can_be_plain(small_OI) else PackedLinear)
    assert isinstance(method.wrap(torch.zeros(2048, 2048)), PackedLinear)


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(96, 64), (256, 256), (256, 688), (120, 1104), (896, 896), (2100, 1040)], ids=str)
def test_a_row_has_the_same_bits_with_any_number_of_others(monkeypatch, is_fast, dtype, shape):
    """Small and large; beyond 384 inputs, where MKL and oneDNN add up otherwise, and 1024, where it depends on rows."""
    for module in (layers, packed_linear):
        monkeypatch.setattr(module, "plain_is_fast", lambda: is_fast)
    torch.manual_seed(0)
    layer = PackingMethod().wrap(torch.randn(shape, dtype=dtype), torch.randn(shape[0], dtype=dtype))
    x_TI = torch.randn(70, shape[1], dtype=dtype)
    together = layer(x_TI)
    alone = torch.cat([layer(x_I[None]) for x_I in x_TI])
    assert torch.equal(alone, together)
    num_threads = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert all(torch.equal(layer(x_TI[:n]), together[:n]) for n in (2, 3, 17, 64))
    finally:
        torch.set_num_threads(num_threads)


def test_both_methods_load_the_same_rows():
    shape = LinearShape({"a": 600, "b": 700}, 1024, bias=True)
    layers = [
        method.load(RandomWeights(torch.float32, torch.device("cpu"), seed=1), shape)
        for method in (DenseMethod(), PackingMethod())
    ]
    x_TI = torch.randn(3, 1024)
    with torch.inference_mode():
        torch.testing.assert_close(layers[0](x_TI), layers[1](x_TI), rtol=1e-5, atol=1e-5)

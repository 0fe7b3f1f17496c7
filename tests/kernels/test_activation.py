import pytest

from aserve.kernels.reference import ReferenceOps
from tests.kernels.cases import Fast

pytestmark = pytest.mark.torch
TWIN = ReferenceOps()


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1), (3, 80), (2, 1025)])
def test_gated_activation(fast: Fast, name: str, num_tokens: int, width: int) -> None:
    gate_up = fast.randn(num_tokens, 2 * width) * 2
    fast.assert_close(getattr(fast.ops, name)(gate_up), getattr(TWIN, name)(gate_up))


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
def test_no_tokens(fast: Fast, name: str) -> None:
    assert getattr(fast.ops, name)(fast.randn(0, 8)).shape == (0, 4)

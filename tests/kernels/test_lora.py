"""What adapters add: the twins agree for any mixture, and a row's bits are its own."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from aserve.kernels.native.native_ops import NativeOps
from aserve.kernels.ops import LoraBatch, LoraWeights, Ops
from aserve.kernels.reference import ReferenceOps
from tests.kernels.cases import Fast

pytestmark = pytest.mark.torch
TWIN = ReferenceOps()
RANK = 32


def factors(fast: Fast, sizes: Sequence[int], num_inputs: int, ranks: Sequence[int]) -> LoraWeights:
    """Of as many adapters as there are ranks, in one buffer as the runner keeps them."""
    num_a, num_b = len(sizes) * num_inputs * RANK, RANK * sum(sizes)
    memory_GN = torch.zeros(len(ranks), num_a + num_b, dtype=fast.dtype, device=fast.device)
    a_GPIR = memory_GN[:, :num_a].view(len(ranks), len(sizes), num_inputs, RANK)
    b_GRO = memory_GN[:, num_a:].view(len(ranks), RANK, sum(sizes))
    for adapter, rank in enumerate(ranks):
        a_GPIR[adapter, ..., :rank] = fast.randn(len(sizes), num_inputs, rank) / num_inputs**0.5
        b_GRO[adapter, :rank] = fast.randn(rank, sum(sizes)) / max(rank, 1) ** 0.5
    return LoraWeights(a_GPIR, b_GRO, torch.tensor(ranks, dtype=torch.int32, device=fast.device), tuple(sizes))


def batch_of(adapters_T: Sequence[int], num_adapters: int, device: torch.device) -> LoraBatch:
    """-1 is a token without one; those come last, as in a captured step."""
    tokens = sorted(range(len(adapters_T)), key=lambda token: (adapters_T[token] < 0, adapters_T[token]))
    counts = torch.tensor([0, *(adapters_T.count(adapter) for adapter in range(num_adapters))])
    return LoraBatch(torch.tensor(tokens, device=device), counts.cumsum(0).int().to(device))


def added(ops: Ops, out_TO: Tensor, x_TI: Tensor, weights: LoraWeights, adapters_T: Sequence[int]) -> Tensor:
    changed_TO = out_TO.clone()
    ops.add_lora(changed_TO, x_TI, weights, batch_of(list(adapters_T), len(weights.ranks_G), x_TI.device))
    return changed_TO


MIXTURES = {
    "one": [2],
    "none": [-1, -1, -1],
    "mixed": [0, -1, 2, 2, 0, 3, -1, 2, 2, 2],
    "a full tile and one more": [1] * 17 + [-1] + [3] * 16,
}


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
@pytest.mark.parametrize(("sizes", "num_inputs"), [((40, 64, 5), 50), ((70,), 300), ((33, 33), 64)], ids=str)
def test_the_twins_agree_and_rows_without_an_adapter_are_left_alone(fast: Fast, mixture, sizes, num_inputs):
    """A tile, an offset of a part or a rank that was wrong would show in some row; rank 0 is a slot without adapter."""
    weights = factors(fast, sizes, num_inputs, [RANK, 3, 16, 17])
    adapters_T = MIXTURES[mixture]
    x_TI = fast.randn(len(adapters_T), num_inputs)
    out_TO = fast.randn(len(adapters_T), sum(sizes))
    actual, expected = (added(ops, out_TO, x_TI, weights, adapters_T) for ops in (fast.ops, TWIN))
    fast.assert_close(actual, expected)
    for token, adapter in enumerate(adapters_T):
        assert torch.equal(actual[token], out_TO[token]) == (adapter < 0), token


def test_a_row_has_the_same_bits_alone_and_among_others_of_any_adapter(fast: Fast):
    weights = factors(fast, (40, 16, 5), 900 if not fast.interpreted else 130, [RANK, 3, 16, 17])
    adapters_T = [token % 5 - 1 for token in range(40)] + [0] * 9
    x_TI, out_TO = fast.randn(49, weights.a_GPIR.shape[2]), fast.randn(49, 61)
    together = added(fast.ops, out_TO, x_TI, weights, adapters_T)
    for token in (1, 2, 22, 48):
        one = slice(token, token + 1)
        alone = added(fast.ops, out_TO[one], x_TI[one], weights, adapters_T[one])
        assert torch.equal(alone[0], together[token]), token


def test_rows_may_be_strided(fast: Fast):
    """Attention's output and the halves of a fused product are views."""
    weights = factors(fast, (20,), 24, [16])
    x_TI, out_TO = fast.randn(6, 40)[:, 8:32], fast.randn(6, 33)[:, :20]
    changed_TO, expected = (
        out_TO.clone(memory_format=torch.preserve_format),
        added(TWIN, out_TO, x_TI, weights, [0] * 6),
    )
    wide_TO = torch.zeros(6, 33, dtype=fast.dtype, device=fast.device)
    wide_TO[:, :20] = changed_TO
    fast.ops.add_lora(wide_TO[:, :20], x_TI, weights, batch_of([0] * 6, 1, x_TI.device))
    fast.assert_close(wide_TO[:, :20], expected)
    assert not wide_TO[:, 20:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_variant_gives_any_number_of_threads_the_same_bits(variant_ops: NativeOps, dtype):
    """A sum that was shared between threads would round in another order."""
    torch.manual_seed(0)
    fast = Fast(variant_ops, torch.device("cpu"), dtype)
    weights = factors(fast, (2100, 40), 700, [RANK, 5])
    adapters_T = [0] * 9 + [1] * 7 + [-1]
    x_TI, out_TO = fast.randn(17, 700), fast.randn(17, 2140)
    num_threads = torch.get_num_threads()
    try:
        results = []
        for num in (1, 2, 3):
            torch.set_num_threads(num)
            results.append(added(variant_ops, out_TO, x_TI, weights, adapters_T))
    finally:
        torch.set_num_threads(num_threads)
    fast.assert_close(results[0], added(TWIN, out_TO, x_TI, weights, adapters_T))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])

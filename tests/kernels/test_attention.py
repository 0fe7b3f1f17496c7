from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from aserve.kernels.ops import AttentionBatch
from aserve.kernels.reference import ReferenceOps
from tests.kernels.cases import Fast, paged

pytestmark = pytest.mark.torch
TWIN = ReferenceOps()

STEPS = {
    "one token": ([1], [1]),
    "around a block": ([7, 8, 9], [1, 1, 1]),
    "ragged decodes": ([1, 150, 33, 2, 64], [1] * 5),
    "a whole prompt": ([37], [37]),
    "two prompts, one cached": ([9, 70], [9, 30]),
    "around a tile": ([15, 16, 17], [15, 16, 17]),
    "mixed": ([5, 90, 20, 41], [1, 1, 20, 3]),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}, {"soft_cap": 2.0}], ids=str)
def test_attention(fast: Fast, step: str, options: dict[str, float]) -> None:
    case = paged(fast, *STEPS[step])
    fast.assert_close(case.attend(fast.ops, **options), case.attend(TWIN, **options))


@pytest.mark.parametrize("head_dim", [8, 16, 64, 80, 128])
@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (4, 2)], ids=str)
def test_head_shapes(fast: Fast, heads: tuple[int, int], head_dim: int) -> None:
    case = paged(fast, [40, 21], [1, 5], heads=heads, head_dim=head_dim)
    fast.assert_close(case.attend(fast.ops), case.attend(TWIN))


@pytest.mark.parametrize("sliding_window", [1, 16, 63, 64, 1000])
def test_windows(fast: Fast, sliding_window: int) -> None:
    case = paged(fast, [130, 150], [1, 70], block_size=16)
    options = {"sliding_window": sliding_window}
    fast.assert_close(case.attend(fast.ops, **options), case.attend(TWIN, **options))


@pytest.mark.parametrize("block_size", [8, 64, 256])
def test_blocks_smaller_and_larger_than_a_tile(fast: Fast, block_size: int) -> None:
    case = paged(fast, [300, 90], [1, 50], block_size=block_size)
    fast.assert_close(case.attend(fast.ops), case.attend(TWIN))


@pytest.mark.parametrize("options", [{}, {"sliding_window": 200}, {"soft_cap": 2.0}], ids=str)
def test_long_prompts_of_wide_heads(triton_fast: Fast, options: dict[str, float]) -> None:
    """Tiles of 128 rows and 128 keys (64 under a cap): several that all rows see, and one that a window cuts."""
    case = paged(triton_fast, [700, 130], [90, 130], head_dim=80, block_size=16)
    triton_fast.assert_close(case.attend(triton_fast.ops, **options), case.attend(TWIN, **options))


def test_a_window_and_a_soft_cap_together(fast: Fast) -> None:
    case = paged(fast, [90, 60], [1, 40])
    options = {"sliding_window": 33, "soft_cap": 1.5}
    fast.assert_close(case.attend(fast.ops, **options), case.attend(TWIN, **options))


def test_large_scores_do_not_overflow(fast: Fast) -> None:
    case = paged(fast, [30, 25], [1, 25])
    case.q_THD.mul_(40)
    for options in ({}, {"soft_cap": 0.5}):
        out = case.attend(fast.ops, **options)
        assert out.isfinite().all()
        fast.assert_close(out, case.attend(TWIN, **options))


def test_queries_may_be_a_slice_of_the_fused_projection(fast: Fast) -> None:
    case = paged(fast, [12, 9], [1, 4])
    wide = fast.randn(5, 8, 16)
    strided = type(case)(wide[:, 2:6], case.k_cache_BPKD, case.v_cache_BPKD, case.batch)
    fast.assert_close(strided.attend(fast.ops), strided.attend(TWIN))


def test_a_decode_does_not_see_its_neighbours(fast: Fast) -> None:
    """Each sequence alone gives what it gives in the batch, up to rounding."""
    case = paged(fast, [3, 100, 31], [1, 1, 1])
    together = case.attend(fast.ops)
    for s in range(3):
        batch = AttentionBatch(
            num_decodes=1,
            slots_T=case.batch.slots_T[:1],
            block_table_SM=case.batch.block_table_SM[s : s + 1],
            seq_lens_S=case.batch.seq_lens_S[s : s + 1],
            query_starts_S1=case.batch.query_starts_S1[:2],
            max_query_len=1,
            max_seq_len=100,
        )
        alone = type(case)(case.q_THD[s : s + 1], case.k_cache_BPKD, case.v_cache_BPKD, batch).attend(fast.ops)
        fast.assert_close(alone, together[s : s + 1])


def test_the_twin_is_causal_attention() -> None:
    """The oracle itself against torch, which knows no pages: whole prompts, contiguous blocks."""
    torch.manual_seed(0)
    case = paged(Fast(TWIN, torch.device("cpu"), torch.float32), [13, 20], [13, 20], block_size=4)
    out_THD = case.attend(TWIN)
    for s, (begin, end) in enumerate(pairwise(case.batch.query_starts_S1.tolist())):
        blocks = case.batch.block_table_SM[s].long()
        k, v = (
            cache[blocks].flatten(0, 1)[: end - begin].transpose(0, 1)
            for cache in (case.k_cache_BPKD, case.v_cache_BPKD)
        )
        q = case.q_THD[begin:end].transpose(0, 1)
        expected = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)
        torch.testing.assert_close(out_THD[begin:end], expected[0].transpose(0, 1))

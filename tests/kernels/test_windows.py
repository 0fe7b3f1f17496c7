"""Blocks that a window has left behind belong to somebody else: whatever is in them changes nothing."""

import pytest
import torch

from aserve.kernels.reference import ReferenceOps
from tests.kernels.cases import Fast, Paged, paged

pytestmark = pytest.mark.torch

SEQ_LENS = [8, 29, 41, 64, 77, 70, 9]
QUERY_LENS = [1, 1, 1, 1, 1, 30, 9]
BLOCK_SIZE = 8


def spoiled(case: Paged, window: int) -> Paged:
    """The same step, where all that no query sees is NaN: blocks before the window, and positions behind the end."""
    k_BPKD, v_BPKD = case.k_cache_BPKD.clone(), case.v_cache_BPKD.clone()
    for s, (seq_len, query_len) in enumerate(zip(SEQ_LENS, QUERY_LENS, strict=True)):
        first_seen = max(0, seq_len - query_len - window + 1)
        blocks = case.batch.block_table_SM[s].tolist()
        for cache in (k_BPKD, v_BPKD):
            cache[blocks[: first_seen // BLOCK_SIZE]] = torch.nan
            if seq_len % BLOCK_SIZE:
                cache[blocks[seq_len // BLOCK_SIZE], seq_len % BLOCK_SIZE :] = torch.nan
    return Paged(case.q_THD, k_BPKD, v_BPKD, case.batch)


@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0}], ids=str)
@pytest.mark.parametrize("window", [1, 8, 13, 24])
def test_what_no_query_sees_is_not_read(fast: Fast, window: int, options: dict[str, float]) -> None:
    case = paged(fast, SEQ_LENS, QUERY_LENS, block_size=BLOCK_SIZE)
    options = options | {"sliding_window": window}
    expected = case.attend(ReferenceOps(), **options)
    fast.assert_close(spoiled(case, window).attend(fast.ops, **options), expected)
    fast.assert_close(spoiled(case, window).attend(ReferenceOps(), **options), expected)

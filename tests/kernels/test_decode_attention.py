from itertools import pairwise

import pytest
import torch

from aserve.kernels.attention_tiles import decode_tiles
from aserve.kernels.decode_attention import choose_num_splits, fit_to_device, launch_cost
from aserve.kernels.reference import ReferenceOps
from aserve.kernels.triton_ops import TritonOps
from tests.kernels.cases import Fast, paged

pytestmark = pytest.mark.torch

H200_PLACES = 132 * 3
CONTEXTS = (128, 512, 1024, 4096, 16384, 32768, 131072)


def test_a_small_batch_is_split_until_it_fills_the_device() -> None:
    """8 key heads and tiles of 64 keys, as in Llama-3.1-8B."""
    assert choose_num_splits(8, 4096 // 64, H200_PLACES) == 32
    assert choose_num_splits(8, 16384 // 64, H200_PLACES) * 8 > 0.8 * H200_PLACES
    assert choose_num_splits(8 * 32, 1024 // 64, H200_PLACES) == 1
    assert choose_num_splits(8 * 256, 4096 // 64, H200_PLACES) == 1
    assert choose_num_splits(1, 1, H200_PLACES) == 1


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("num_places", [H200_PLACES, 2 * 132, 2 * 108, 80])
def test_no_batch_size_costs_a_cliff(num_kv_heads: int, num_places: int) -> None:
    """One sequence more never makes the predicted time of a sequence over 1.15 times longer."""
    for context in CONTEXTS:
        num_tiles = context // 64
        costs = [
            launch_cost(n, num_tiles, choose_num_splits(n, num_tiles, num_places), num_places) * num_kv_heads / n
            for n in range(num_kv_heads, num_kv_heads * 300, num_kv_heads)
        ]
        assert max(after / before for before, after in pairwise(costs)) <= 1.15, context


@pytest.mark.parametrize("batch", [1, 8, 32, 64, 256])
def test_the_chosen_splits_keep_the_device_busy(batch: int) -> None:
    """With 32k keys in contexts of 1k or more, at least 80 % of the time is that of tiles on a full device."""
    for num_tiles in (context // 64 for context in CONTEXTS if context >= 1024 and batch * context >= 2**15):
        splits = choose_num_splits(batch * 8, num_tiles, H200_PLACES)
        ideal = batch * 8 * num_tiles / H200_PLACES
        assert ideal / launch_cost(batch * 8, num_tiles, splits, H200_PLACES) > 0.8, num_tiles


@pytest.mark.parametrize(("num_seqs", "programs_per_sm"), [(49, 3), (50, 4), (64, 4), (66, 4), (67, 3), (256, 3)])
def test_a_few_programs_too_many_are_crowded_together(num_seqs: int, programs_per_sm: int) -> None:
    """Of 8 key heads and 132 processors: 396 places, or 528 with a tile less under way in each."""
    tiles, num_splits = fit_to_device(decode_tiles(128, 4, 2, (9, 0)), num_seqs * 8, 1024, 132)
    assert (tiles.programs_per_sm, num_splits) == (programs_per_sm, 1)


@pytest.mark.parametrize(
    ("num_seqs", "context", "programs_per_sm", "num_splits"),
    [
        (1, 1024, 3, 8),
        (16, 1024, 3, 1),
        (32, 1024, 3, 1),
        (1, 4096, 3, 32),
        (2, 4096, 4, 32),
        (4, 4096, 4, 16),
        (6, 4096, 4, 11),
        (8, 4096, 4, 8),
        (12, 4096, 4, 5),
        (16, 4096, 4, 4),
        (48, 4096, 3, 1),
        (1, 16384, 3, 43),
        (2, 16384, 4, 32),
    ],
)
def test_split_contexts_are_crowded(num_seqs: int, context: int, programs_per_sm: int, num_splits: int) -> None:
    """By as many splits as an H200 was fastest with at 4,096; what fits unsplit is neither split nor crowded."""
    tiles, splits = fit_to_device(decode_tiles(128, 4, 2, (9, 0)), num_seqs * 8, context, 132)
    assert (tiles.programs_per_sm, splits) == (programs_per_sm, num_splits)


def test_tiles_that_were_not_measured_crowded_are_not() -> None:
    for tiles in decode_tiles(128, 4, 2, (8, 9)), decode_tiles(64, 4, 2, (9, 0)), decode_tiles(128, 32, 2, (9, 0)):
        assert fit_to_device(tiles, tiles.programs_per_sm * 132 + 1, 16, 132) == (tiles, 1)
        assert fit_to_device(tiles, 8, 8192, 132)[0] == tiles


@pytest.mark.parametrize("num_sms", [1, 64])
def test_crowded_tiles_give_the_same_result(triton_each: Fast, num_sms: int) -> None:
    """Four programs for one processor, which runs three of them otherwise; by four splits each for 64 processors."""
    case = paged(triton_each, [700, 130], [1, 1], heads=(8, 2), head_dim=128)
    triton_each.assert_close(case.attend(TritonOps(num_sms)), case.attend(ReferenceOps()))


@pytest.mark.parametrize("num_sms", [1, 2, 8, 64])
@pytest.mark.parametrize("capability", [(9, 0), (8, 9)], ids=str)
def test_neither_splits_nor_tiles_change_the_result(
    triton_fast: Fast, num_sms: int, capability: tuple[int, int]
) -> None:
    case = paged(triton_fast, [500, 3, 130], [1, 1, 1])
    triton_fast.assert_close(case.attend(TritonOps(num_sms, capability)), case.attend(ReferenceOps()))


@pytest.mark.parametrize("num_sms", [1, 64])
def test_a_padding_row_without_context_gives_zeros(triton_fast: Fast, num_sms: int) -> None:
    case = paged(triton_fast, [300, 20], [1, 1])
    case.batch.seq_lens_S[1] = 0
    assert not case.attend(TritonOps(num_sms))[1].any()


@pytest.mark.parametrize("head_dim", [16, 80])
def test_a_group_that_overflows_sixteen_rows(triton_fast: Fast, head_dim: int) -> None:
    case = paged(triton_fast, [70, 5], [1, 3], heads=(40, 2), head_dim=head_dim)
    triton_fast.assert_close(case.attend(triton_fast.ops), case.attend(ReferenceOps()))


@pytest.mark.parametrize("block_size", [8, 16, 128])
@pytest.mark.parametrize("sliding_window", [None, 37])
def test_blocks_that_nobody_sees_may_hold_nan(triton_fast: Fast, block_size: int, sliding_window: int | None) -> None:
    """The null block, what lies behind a context in its last block, and what a window has left behind."""
    seq_lens, query_lens = [300, 40, 150], [1, 1, 70]
    case = paged(triton_fast, seq_lens, query_lens, block_size=block_size)
    expected = case.attend(ReferenceOps(), sliding_window=sliding_window)
    visible = torch.zeros(case.k_cache_BPKD.shape[:2], dtype=torch.bool)
    for s, (seq_len, num_queries) in enumerate(zip(seq_lens, query_lens, strict=True)):
        first = 0 if sliding_window is None else max(seq_len - num_queries - sliding_window + 1, 0)
        positions = torch.arange(first, seq_len)
        visible[case.batch.block_table_SM[s].long().cpu()[positions // block_size], positions % block_size] = True
    for cache in (case.k_cache_BPKD, case.v_cache_BPKD):
        cache[~visible.to(triton_fast.device)] = torch.nan
    for num_sms in (1, 64):
        out = case.attend(TritonOps(num_sms), sliding_window=sliding_window)
        triton_fast.assert_close(out, expected)

"""Attention of our own on a CPU, in every variant that can run here: its results, its bits, and what it reads."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from aserve.kernels.cpu import CpuOps
from aserve.kernels.native.attention import CACHE_NAMES
from aserve.kernels.reference import ReferenceOps
from tests.kernels.cases import Fast, Paged, native_ops, paged

pytestmark = pytest.mark.torch
TWIN = ReferenceOps()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtypes", CACHE_NAMES, ids=CACHE_NAMES.values())
"""Of queries, and of the cache."""
FLOAT32 = torch.float32, torch.float32

GRID = {
    "one head, one key": ((1, 1), 64, 8, [1], [1]),
    "no groups": ((4, 4), 64, 16, [1, 17, 300], [1, 1, 40]),
    "groups of two": ((8, 4), 32, 16, [256, 257, 511, 512], [1, 1, 2, 512]),
    "groups of three, wide": ((6, 2), 256, 32, [33, 700], [1, 65]),
    "groups of five": ((5, 1), 96, 8, [5, 1030], [5, 9]),
    "groups of seven": ((14, 2), 64, 16, [1, 128, 600, 300], [1, 1, 1, 129]),
    "groups of eight": ((32, 4), 128, 64, [4096, 90], [1, 64]),
    "many heads": ((32, 32), 64, 16, [40, 20], [1, 20]),
    "one key head for more heads than rows": ((71, 1), 64, 16, [270, 30], [1, 3]),
    "heads that fill no vector": ((6, 2), 80, 16, [300, 50], [1, 50]),
    "heads of an odd size": ((2, 1), 13, 8, [30, 270], [1, 20]),
    "blocks of one, and larger than a tile": ((2, 1), 16, 1, [300, 20], [1, 20]),
    "a long context": ((2, 1), 64, 512, [4096], [1]),
}
"""Heads and key heads, their size, the block size, contexts, and how many of each are queries."""


OPTIONS = {"plain": {}, "window": {"sliding_window": 40}, "soft cap": {"soft_cap": 2.0}}


def build(dtypes: tuple[torch.dtype, torch.dtype], name: str) -> Paged:
    torch.manual_seed(0)
    heads, head_dim, block_size, lens, query_lens = GRID[name]
    fast = Fast(TWIN, torch.device("cpu"), dtypes[0])
    return paged(fast, lens, query_lens, heads=heads, head_dim=head_dim, block_size=block_size, cache_dtype=dtypes[1])


@cache
def expected_of(dtypes: tuple[torch.dtype, torch.dtype], name: str, options: str) -> Tensor:
    """By the twin, once for all variants."""
    return build(dtypes, name).attend(TWIN, **OPTIONS[options])


def spoiled(case: Paged, window: int | None) -> Paged:
    """The same step, where all of the cache is NaN but what its queries see."""
    starts, block_size = case.batch.query_starts_S1.tolist(), case.k_cache_BPKD.shape[1]
    seen = torch.zeros(case.k_cache_BPKD.shape[:2], dtype=torch.bool)
    for s, seq_len in enumerate(case.batch.seq_lens_S.tolist()):
        first = seq_len - (starts[s + 1] - starts[s])
        positions = torch.arange(0 if window is None else max(0, first - window + 1), seq_len)
        seen[case.batch.block_table_SM[s].long()[positions // block_size], positions % block_size] = True
    caches = (x.masked_fill(~seen[..., None, None], torch.nan) for x in (case.k_cache_BPKD, case.v_cache_BPKD))
    return Paged(case.q_THD, *caches, case.batch)


def planned_anew(case: Paged) -> Paged:
    """The same step as one that is not known yet: a plan is for the threads that there were."""
    return Paged(case.q_THD, case.k_cache_BPKD, case.v_cache_BPKD, replace(case.batch))


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@DTYPES
@pytest.mark.parametrize("name", GRID)
@pytest.mark.parametrize("options", OPTIONS)
def test_every_shape_gives_what_its_twin_gives_and_reads_nothing_else(variant_ops, name, dtypes, options):
    """Catches a wrong key, weight or lane at the edge of a tile, vector, block or window, and reads beyond it."""
    case = spoiled(build(dtypes, name), OPTIONS[options].get("sliding_window"))
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        actual, expected = (
            planned_anew(case).attend(variant_ops, **OPTIONS[options]),
            expected_of(dtypes, name, options),
        )
        tolerance = TOLERANCE[dtypes[0]]
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@DTYPES
@pytest.mark.parametrize("window", [None, 40, 300])
@pytest.mark.parametrize("heads", [(7, 1), (2, 2)], ids=str)
def test_a_query_has_the_same_bits_alone_and_in_any_chunk(variant_ops, heads, window, dtypes):
    """Catches sums whose order depends on the rows of an item, on its first key, or on who has which tile."""
    torch.manual_seed(0)
    fast = Fast(variant_ops, torch.device("cpu"), dtypes[0])
    length, options = 1100, {} if window is None else {"sliding_window": window}
    whole = paged(fast, [length], [length], heads=heads, head_dim=64, block_size=16, cache_dtype=dtypes[1])
    torch.set_num_threads(1)
    expected = whole.attend(variant_ops, **options)
    for num_threads, begin, num_queries in ((2, 0, 1100), (2, 1099, 1), (3, 700, 1), (2, 250, 13), (1, 511, 300)):
        torch.set_num_threads(num_threads)
        piece = slice_of(whole, begin, num_queries)
        assert torch.equal(piece.attend(variant_ops, **options), expected[begin : begin + num_queries]), begin


def slice_of(whole: Paged, begin: int, num_queries: int) -> Paged:
    """Some of the queries of a prompt, as a step that has no others."""
    batch = type(whole.batch)(
        num_decodes=int(num_queries == 1),
        slots_T=whole.batch.slots_T[begin : begin + num_queries],
        block_table_SM=whole.batch.block_table_SM,
        seq_lens_S=whole.batch.seq_lens_S.new_tensor([begin + num_queries]),
        query_starts_S1=whole.batch.query_starts_S1.new_tensor([0, num_queries]),
        max_query_len=num_queries,
        max_seq_len=begin + num_queries,
    )
    return Paged(whole.q_THD[begin : begin + num_queries], whole.k_cache_BPKD, whole.v_cache_BPKD, batch)


@DTYPES
@pytest.mark.parametrize(("heads", "head_dim"), [((8, 4), 32), ((6, 3), 48), ((14, 2), 64), ((4, 4), 13)], ids=str)
def test_a_query_has_the_same_bits_alone_and_in_any_crowd(variant_ops, heads, head_dim, dtypes):
    """Catches sums that depend on how many key heads a thread takes at once, and heads taken for each other."""
    torch.manual_seed(0)
    fast = Fast(variant_ops, torch.device("cpu"), dtypes[0])
    lens = [300, 20, 257, 1, 90, 600, 33, 170, 40]
    sizes = {"heads": heads, "head_dim": head_dim, "block_size": 16}
    crowd = paged(fast, lens, [1] * 8 + [3], **sizes, cache_dtype=dtypes[1])
    torch.set_num_threads(4)
    expected = torch.cat([alone(crowd, s).attend(variant_ops) for s in range(len(lens))])
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        assert torch.equal(planned_anew(crowd).attend(variant_ops), expected), num_threads


def alone(crowd: Paged, s: int) -> Paged:
    """One of the sequences of a step, as a step that has no others."""
    begin, end = crowd.batch.query_starts_S1.tolist()[s : s + 2]
    batch = type(crowd.batch)(
        num_decodes=int(end == begin + 1),
        slots_T=crowd.batch.slots_T[begin:end],
        block_table_SM=crowd.batch.block_table_SM[s : s + 1],
        seq_lens_S=crowd.batch.seq_lens_S[s : s + 1],
        query_starts_S1=crowd.batch.query_starts_S1.new_tensor([0, end - begin]),
        max_query_len=end - begin,
        max_seq_len=crowd.batch.max_seq_len,
    )
    return Paged(crowd.q_THD[begin:end], crowd.k_cache_BPKD, crowd.v_cache_BPKD, batch)


@pytest.mark.parametrize(
    ("heads", "head_dim", "lens", "num_heads"),
    [
        ((8, 4), 32, [100] * 16, {4}),  # work enough for all threads
        ((8, 4), 32, [100] * 4, {2}),
        ((8, 4), 32, [100], {1}),
        ((8, 4), 32, [2000], {4}),  # tiles are enough, too
        ((16, 8), 64, [100] * 16, {4}),  # no more than there is room for
        ((6, 3), 128, [100] * 16, {1}),
        ((4, 4), 13, [100] * 16, {1}),  # a word of bfloat16 would be of two heads
    ],
    ids=str,
)
def test_key_heads_are_for_one_thread_where_there_is_work_for_all(heads, head_dim, lens, num_heads):
    """Catches memory read in pieces, which is slower, and a thread that waits for others."""
    fast = Fast(native_ops(), torch.device("cpu"), torch.float32)
    case = paged(fast, lens, [1] * len(lens), heads=heads, head_dim=head_dim, block_size=16)
    torch.set_num_threads(2)
    k_cache_BPKD = case.k_cache_BPKD
    plan = fast.ops.attention.plan(case.batch, (None, heads[0], k_cache_BPKD.shape, k_cache_BPKD.stride()))
    assert {item.num_heads for item in plan.items} == num_heads


@DTYPES
def test_what_is_not_finite_stays_in_its_sequence(dtypes):
    """Catches a kernel that multiplies a neighbour's keys or values by 0."""
    ops = native_ops()
    case = build(dtypes, "groups of seven")
    clean = case.attend(ops)
    owned = case.batch.block_table_SM[1].long()
    for x_BPKD, worst in ((case.k_cache_BPKD, torch.nan), (case.v_cache_BPKD, torch.inf)):
        x_BPKD[owned[owned > 0]] = worst
    out_THD = case.attend(ops)
    assert not out_THD[1].isfinite().any()
    assert torch.equal(out_THD[[0, *range(2, len(out_THD))]], clean[[0, *range(2, len(clean))]])


def test_layers_with_other_windows_do_not_share_what_was_worked_out():
    """Catches a plan that is remembered for the wrong layer of a step."""
    ops = native_ops()
    case = build(FLOAT32, "groups of two")
    for options in ({}, {"sliding_window": 5}, {}, {"sliding_window": 300}, {"sliding_window": 5, "soft_cap": 1.0}):
        torch.testing.assert_close(case.attend(ops, **options), case.attend(TWIN, **options), atol=1e-5, rtol=1e-5)


def test_layers_of_a_step_are_dealt_out_once(monkeypatch):
    """Catches what is worked out again in each layer, which costs as much as a small layer's attention."""
    ops = native_ops()
    case = build(FLOAT32, "no groups")
    dealt: list[Tensor] = []
    deal = ops.attention._deal
    monkeypatch.setattr(ops.attention, "_deal", lambda batch, *rest: dealt.append(batch) or deal(batch, *rest))
    for _ in range(3):
        case.attend(ops)
    assert dealt == [case.batch]


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float16, 64), (torch.float32, 320)], ids=str)
def test_what_the_kernel_does_not_take_goes_to_torch(dtype, head_dim):
    """Catches a kernel that reads half precision as something else, or heads that its buffers do not hold."""
    torch.manual_seed(0)
    fast = Fast(native_ops(), torch.device("cpu"), dtype)
    case = paged(fast, [30, 25], [1, 25], head_dim=head_dim)
    assert torch.equal(case.attend(fast.ops), case.attend(CpuOps()))

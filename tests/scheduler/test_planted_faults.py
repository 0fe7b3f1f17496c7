"""The checker is checked: each fault that we plant is caught, by `check()` and, where it can do harm, by the oracle."""

import pytest

from aserve.core.ids import BlockHash
from aserve.kv_cache import paged_cache
from aserve.kv_cache.block_pool import BlockPool
from aserve.kv_cache.paged_cache import PagedCache
from aserve.scheduler.scheduler import Scheduler
from tests.scheduler.traces import run_trace

NUM_TRACES = 200


def first_complaint(*, checked: bool) -> str:
    """The message of the first assertion that fails in the traces; "" if none does."""
    for seed in range(NUM_TRACES):
        try:
            run_trace(seed, checked=checked)
        except AssertionError as error:
            return str(error)
    return ""


def test_the_traces_pass_where_nothing_is_planted():
    assert first_complaint(checked=False) == ""


@pytest.fixture
def leaked_reference(monkeypatch):
    release = BlockPool.release
    monkeypatch.setattr(BlockPool, "release", lambda pool, block_ids: release(pool, list(block_ids)[1:]))


@pytest.fixture
def early_free(monkeypatch):
    """A hit on a block that somebody holds takes no reference of its own."""
    pin = BlockPool.pin
    monkeypatch.setattr(BlockPool, "pin", lambda pool, ids: pin(pool, [i for i in ids if pool.refs(i) == 0]))


@pytest.fixture
def stale_hit(monkeypatch):
    """A block that is given away can still be found by its old hash."""

    def forget_half(pool: BlockPool, block_id):
        pool._hashes[block_id] = None

    monkeypatch.setattr(BlockPool, "_evict", forget_half)


@pytest.fixture
def ignored_salt(monkeypatch):
    monkeypatch.setattr(paged_cache, "root_hash", lambda _salt: BlockHash(bytes(32)))


@pytest.fixture
def ignored_parent(monkeypatch):
    """A block's hash covers its own tokens and no longer those before."""

    def extend(chain, token_ids, num_blocks, block_size):
        for index in range(len(chain) - 1, num_blocks):
            chain.append(BlockHash(bytes(token_ids[index * block_size : (index + 1) * block_size])))

    monkeypatch.setattr(paged_cache, "extend_chain", extend)


@pytest.fixture
def early_seal(monkeypatch):
    """Blocks become shareable when they are planned, not when they have landed."""
    plan_prefill = Scheduler._plan_prefill

    def plan_and_seal(scheduler, sequence, budget, new_blocks, slices):
        size = plan_prefill(scheduler, sequence, budget, new_blocks, slices)
        if sequence.num_computed >= sequence.table.seal_at:
            scheduler._cache.seal(sequence.table, sequence.token_ids, sequence.num_computed)
        return size

    monkeypatch.setattr(Scheduler, "_plan_prefill", plan_and_seal)


@pytest.fixture
def lost_row(monkeypatch):
    vacate = Scheduler._vacate

    def keep_row(scheduler, sequence):
        vacate(scheduler, sequence)
        scheduler._free_rows.pop()

    monkeypatch.setattr(Scheduler, "_vacate", keep_row)


@pytest.fixture
def wrong_victim(monkeypatch):
    monkeypatch.setattr("aserve.scheduler.scheduler.choose_victim", lambda running, _beneficiary: running.first)


@pytest.fixture
def shared_tail(monkeypatch):
    """The last block of a prompt is taken from the cache too, and then written again."""
    match = PagedCache._match
    monkeypatch.setattr(PagedCache, "_match", lambda cache, table, token_ids: match(cache, table, [*token_ids, 0]))


@pytest.mark.parametrize(
    ("fault", "invariant"),
    [
        ("leaked_reference", "I2"),
        ("early_free", "I2"),
        ("stale_hit", "I8"),
        ("early_seal", "I6"),
        ("lost_row", "I12"),
        ("shared_tail", "I9"),
    ],
)
def test_check_names_the_invariant_that_a_fault_breaks(fault, invariant, request):
    request.getfixturevalue(fault)
    assert first_complaint(checked=True).startswith(invariant)


@pytest.mark.parametrize("fault", ["stale_hit", "ignored_salt", "ignored_parent", "early_seal", "wrong_victim"])
def test_the_oracle_alone_catches_what_would_have_been_a_wrong_answer(fault, request):
    request.getfixturevalue(fault)
    assert first_complaint(checked=False).startswith("I21")

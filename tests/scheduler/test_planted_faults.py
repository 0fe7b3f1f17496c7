"""The checker is checked: each fault that we plant is caught, by `check()` and, where it can do harm, by the oracle."""

import msgspec
import pytest

from aserve.core.ids import BlockHash, Row
from aserve.core.plan import BlockOps
from aserve.core.request import Request
from aserve.kv_cache import matching, paged_cache
from aserve.kv_cache.block_pool import BlockPool
from aserve.kv_cache.host_memory import HostMemory
from aserve.kv_cache.paged_cache import PagedCache
from aserve.kv_cache.swap import HostPool
from aserve.scheduler import residents, sequence
from aserve.scheduler.adapter_places import AdapterPlaces
from aserve.scheduler.admission import Admission
from aserve.scheduler.landing import Landing
from aserve.scheduler.planner import Planner
from aserve.scheduler.residents import Residents
from aserve.scheduler.states import State
from aserve.scheduler.undo import Inquest
from tests.scheduler.sync_loop import SyncLoop, request
from tests.scheduler.test_poison import run_trials
from tests.scheduler.traces import run_trace

NUM_TRACES = 200


def first_complaint(*, checked: bool, num_traces: int = NUM_TRACES) -> str:
    """The message of the first assertion that fails in the traces; "" if none does."""
    for seed in range(num_traces):
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

    def forget_half(pool: BlockPool, block_id, _block_hash):
        pool._hashes[block_id] = None

    monkeypatch.setattr(BlockPool, "_evict", forget_half)


@pytest.fixture
def ignored_salt(monkeypatch):
    monkeypatch.setattr(paged_cache, "root_hash", lambda _salt: BlockHash(bytes(32)))


@pytest.fixture
def ignored_adapter(monkeypatch):
    """A block's hash covers tokens alone."""
    monkeypatch.setattr(Request, "extra_keys", ())


@pytest.fixture
def too_many_adapters(monkeypatch):
    """Admission asks who may run, and lets everybody."""
    monkeypatch.setattr(AdapterPlaces, "allows", lambda _places, _sequence: True)


@pytest.fixture
def ignored_parent(monkeypatch):
    """A block's hash covers its own tokens and no longer those before."""

    def extend(chain, token_ids, num_blocks, block_size, _extra_keys):
        for index in range(len(chain) - 1, num_blocks):
            chain.append(BlockHash(bytes(token_ids[index * block_size : (index + 1) * block_size])))

    for module in (matching, paged_cache):
        monkeypatch.setattr(module, "extend_chain", extend)


@pytest.fixture
def early_seal(monkeypatch):
    """Blocks become shareable when they are planned, not when they have landed."""
    plan_known = Planner._known

    def plan_and_seal(planner, sequence, *arguments):
        size = plan_known(planner, sequence, *arguments)
        if sequence.num_computed >= sequence.table.seal_at:
            planner._residents._cache.seal(sequence.table, sequence.token_ids, sequence.num_computed)
        return size

    monkeypatch.setattr(Planner, "_known", plan_and_seal)


@pytest.fixture
def rejected_drafts_sealed(monkeypatch):
    """What a step wrote for a slice is taken for landed, accepted or not."""
    take_in_run = Landing._take_in_run

    def seal_all(landing, piece, token_ids, scores):
        take_in_run(landing, piece, token_ids, scores)
        owner = landing._sequences.get(piece.seq_id)
        end = piece.start + piece.num_tokens
        if owner is not None and end >= owner.table.seal_at:
            landing._cache.seal(owner.table, [*owner.token_ids[: piece.start], *piece.token_ids], end)

    monkeypatch.setattr(Landing, "_take_in_run", seal_all)


@pytest.fixture
def rejected_drafts_counted(monkeypatch):
    """A sequence goes on behind all of its drafts."""
    take_in_run = Landing._take_in_run

    def count_all(landing, piece, token_ids, scores):
        owner = landing._sequences.get(piece.seq_id)
        take_in_run(landing, piece, token_ids, scores)
        if owner is not None and owner.state is State.RUNNING:
            owner.num_computed = piece.start + piece.num_tokens

    monkeypatch.setattr(Landing, "_take_in_run", count_all)


@pytest.fixture
def lost_row(monkeypatch):
    vacate = Residents._vacate

    def keep_row(residents, sequence):
        vacate(residents, sequence)
        residents._free_rows.pop()

    monkeypatch.setattr(Residents, "_vacate", keep_row)


@pytest.fixture
def kept_row(monkeypatch):
    """Who is preempted keeps the number of its row."""
    send_to_wait = Residents._send_to_wait

    def keep(residents, sequence):
        send_to_wait(residents, sequence)
        sequence.row = Row(0)

    monkeypatch.setattr(Residents, "_send_to_wait", keep)


@pytest.fixture
def nobody_admitted(monkeypatch):
    monkeypatch.setattr(Residents, "admit", lambda *_: False)


@pytest.fixture
def too_long(monkeypatch):
    """A sequence may grow beyond what the cache holds."""
    monkeypatch.setattr(Admission, "context_len_for", lambda _admission, _request: 10**6)


@pytest.fixture
def hashed_as_others(monkeypatch):
    """A block gets the hash of other tokens than it holds."""
    seal = PagedCache.seal
    monkeypatch.setattr(
        PagedCache, "seal", lambda cache, table, ids, num_landed: seal(cache, table, [i + 1 for i in ids], num_landed)
    )


@pytest.fixture
def wrong_victim(monkeypatch):
    monkeypatch.setattr(residents, "choose_victims", lambda running, _beneficiary: [running.first])


@pytest.fixture
def shared_tail(monkeypatch):
    """The last block of a prompt is taken from the cache too, and then written again."""
    match = matching.Matcher.match
    monkeypatch.setattr(matching.Matcher, "match", lambda seeker, table, ids: match(seeker, table, [*ids, 0]))


@pytest.fixture
def missing_copy(monkeypatch):
    """A fork gets a block of its own for what it will write, and nobody fills it."""
    fork = PagedCache.fork
    monkeypatch.setattr(PagedCache, "fork", lambda *a, **k: None if fork(*a, **k) is None else ())


@pytest.fixture
def written_together(monkeypatch):
    """A fork shares the block that both will write to."""
    share = PagedCache._share
    monkeypatch.setattr(PagedCache, "_share", lambda cache, source, table, num: share(cache, source, table, num + 1))


@pytest.fixture
def early_fork(monkeypatch):
    """A sibling does not wait until the step that computes the prompt has been planned."""
    admit = Admission.admit
    monkeypatch.setattr(
        Admission, "admit", lambda *a, settling, others_run: admit(*a, settling=(), others_run=others_run)
    )


@pytest.fixture
def pruned_beam_kept(monkeypatch):
    """A beam that takes another's past does not let go of its own."""
    rebase = PagedCache.rebase

    def keep(cache, table, parent, num_positions):
        cache._pool.pin(table.block_ids[: num_positions // cache.block_size])
        return rebase(cache, table, parent, num_positions)

    monkeypatch.setattr(PagedCache, "rebase", keep)


@pytest.fixture
def leaked_host_block(monkeypatch):
    release = HostPool.release
    monkeypatch.setattr(HostPool, "release", lambda pool, host_ids: release(pool, list(host_ids)[1:]))


@pytest.fixture
def mixed_up_swap(monkeypatch):
    """Blocks come back from the host in another order."""
    take_moves = HostMemory.take_moves

    def mix(memory):
        outs, moves = take_moves(memory)
        return outs, tuple(zip((a for a, _ in moves), (b for _, b in reversed(moves)), strict=True))

    monkeypatch.setattr(HostMemory, "take_moves", mix)


@pytest.fixture
def one_seed_for_all(monkeypatch):
    row_sampling = sequence.row_sampling
    monkeypatch.setattr(sequence, "row_sampling", lambda request, _index=0: row_sampling(request))


@pytest.fixture
def prompts_not_rewound(monkeypatch):
    """After a failed step who decodes goes back to what has landed, and who computes a prompt does not."""
    rewind = Residents.rewind
    monkeypatch.setattr(
        Residents,
        "rewind",
        lambda residents, plans, slices: rewind(residents, plans, [(s, p) for s, p in slices if not p.token_ids]),
    )


@pytest.fixture
def answers_not_rewound(monkeypatch):
    """The other way round."""
    rewind = Residents.rewind
    monkeypatch.setattr(
        Residents,
        "rewind",
        lambda residents, plans, slices: rewind(residents, plans, [(s, p) for s, p in slices if p.token_ids]),
    )


@pytest.fixture
def row_not_set_up_anew(monkeypatch):
    """Who went through a failed step goes on with what the runner knows of it."""
    rewind = Residents.rewind

    def keep_rows(residents, plans, slices):
        slices = list(slices)
        known = [taken for taken, _ in slices if taken.num_bound is None]
        rewind(residents, plans, slices)
        for taken in known:
            if taken.state is State.RUNNING:
                taken.num_bound = None

    monkeypatch.setattr(Residents, "rewind", keep_rows)


@pytest.fixture
def newcomer_kept(monkeypatch):
    """Who took its row in a failed step stays, on blocks that were to be copied or found by what never landed."""
    rewind = Residents.rewind

    def keep(residents, plans, slices):
        for newcomer in residents.running:
            newcomer.settled_in = -1
        rewind(residents, [msgspec.structs.replace(plan, block_ops=None) for plan in plans], slices)

    monkeypatch.setattr(Residents, "rewind", keep)


@pytest.fixture
def failed_copies_trusted(monkeypatch):
    """What a failed step was to bring to the host or from there is taken for what it should have been."""
    rewind = Residents.rewind

    def trust(residents, plans, slices):
        scrubs_only = [
            msgspec.structs.replace(plan, block_ops=BlockOps(plan.block_ops.scrubs)) if plan.block_ops else plan
            for plan in plans
        ]
        rewind(residents, scrubs_only, slices)

    monkeypatch.setattr(Residents, "rewind", trust)


@pytest.fixture
def lost_scrub(monkeypatch):
    """A scrub that a failed step took along does not come again."""
    rewind = Residents.rewind

    def lose(residents, plans, slices):
        rewind(residents, plans, slices)
        residents.scrubs.clear()

    monkeypatch.setattr(Residents, "rewind", lose)


@pytest.fixture
def first_suspect_blamed(monkeypatch):
    monkeypatch.setattr(Inquest, "failed", lambda inquest: inquest._suspects.pop(0))


@pytest.fixture
def half_of_the_suspects_forgotten(monkeypatch):
    """A trial that fails clears those who were tried."""
    failed = Inquest.failed

    def clear(inquest):
        if len(inquest._suspects) == 1:
            return failed(inquest)
        inquest.landed()
        return None

    monkeypatch.setattr(Inquest, "failed", clear)


@pytest.mark.parametrize(
    "fault",
    [
        *("prompts_not_rewound", "answers_not_rewound", "row_not_set_up_anew", "newcomer_kept", "lost_scrub"),
        *("first_suspect_blamed", "half_of_the_suspects_forgotten"),
    ],
)
def test_crowds_with_culprits_catch_a_fault_of_the_undo(fault, request):
    request.getfixturevalue(fault)
    with pytest.raises(AssertionError):
        run_trials(range(16))


def test_the_oracle_alone_catches_a_copy_that_was_never_made(failed_copies_trusted):
    assert first_complaint(checked=False, num_traces=300).startswith("I21")


@pytest.mark.parametrize(
    ("fault", "invariant"),
    [
        ("leaked_reference", "I2"),
        ("early_free", "I2"),
        ("stale_hit", "I8"),
        ("early_seal", "I6"),
        ("lost_row", "I12"),
        ("kept_row", "I11"),
        ("nobody_admitted", "I13"),
        ("too_long", "I17"),
        ("hashed_as_others", "I22"),
        ("shared_tail", "I9"),
        ("written_together", "I4"),
        ("pruned_beam_kept", "I2"),
        ("leaked_host_block", "I2"),
        ("rejected_drafts_sealed", "I6"),
        ("rejected_drafts_counted", "I18"),
        ("too_many_adapters", "I7"),
    ],
)
def test_check_names_the_invariant_that_a_fault_breaks(fault, invariant, request):
    request.getfixturevalue(fault)
    assert first_complaint(checked=True).startswith(invariant)


@pytest.mark.parametrize(
    "fault",
    [
        *(
            "stale_hit",
            "ignored_salt",
            "ignored_adapter",
            "ignored_parent",
            "early_seal",
            "wrong_victim",
            "missing_copy",
        ),
        *("written_together", "early_fork", "mixed_up_swap", "one_seed_for_all", "rejected_drafts_sealed"),
    ],
)
def test_the_oracle_alone_catches_what_would_have_been_a_wrong_answer(fault, request):
    request.getfixturevalue(fault)
    assert first_complaint(checked=False).startswith(("I21", "I4", "I6"))  # the last two are those of FakeKV


def test_steps_without_an_end_are_noticed(monkeypatch):
    """There is always one more to take, and none brings a request on."""
    loop = SyncLoop(num_blocks=20)
    loop.add(request("a", (0, 1)))
    monkeypatch.setattr(SyncLoop, "step", lambda _loop: True)
    with pytest.raises(AssertionError, match="I15"):
        loop.drain()

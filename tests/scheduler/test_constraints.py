"""Constrained sequences: when they are planned, with which masks, and what becomes of those that cannot go on."""

from aserve.core.errors import ConstraintError, NonFiniteLogitsError
from aserve.core.plan import RowControls
from aserve.scheduler.sequence import row_sampling
from tests.scheduler.sync_loop import EOS, LETTERS, SyncLoop, request, two_of_three


def inits(loop):
    return [init for plan in loop.plans for init in plan.inits]


def test_a_mask_comes_with_the_row_and_the_row_runs_ahead_of_its_tokens():
    """Depth 2: the step of the second token is planned before the first has landed."""
    loop = SyncLoop(depth=2, num_blocks=30)
    loop.add(request("free", (0,), max_tokens=6))
    loop.add(request("bound", (1,), max_tokens=6, allowed_after=two_of_three))
    first, second = loop.plan(), loop.plan()
    assert [init.mask is None for init in first.inits] == [True, False]
    assert [[piece.seq_id for piece in plan.slices] for plan in (first, second)] == [[0, 1], [0, 1]]
    loop.drain()
    loop.compare()


def test_a_row_that_is_set_up_again_has_a_mask_that_knows_the_answer():
    """So little memory that they preempt each other: a mask of before would have followed too much, or too little."""
    loop = SyncLoop(depth=2, num_blocks=6)
    for name in "ab":
        loop.add(request(name, (0, 1), max_tokens=7, allowed_after=two_of_three))
    while loop.step():
        for init in loop.plans[-1].inits if loop.plans else ():
            [sequence] = [s for s in loop.scheduler._roster.sequences.values() if s.id == init.seq_id] or [None]
            assert sequence is None or sequence.constraint is init.mask
    assert loop.scheduler.statistics().num_preemptions > 0
    masks = [id(init.mask) for init in inits(loop)]
    assert len(set(masks)) == len(masks) > 2
    loop.compare()


def test_a_dead_end_ends_its_request_alone_and_says_why():
    def two_tokens(said):
        return LETTERS if len(said) < 2 else ()

    loop = SyncLoop(depth=2)
    loop.add(request("a", (0, 1), max_tokens=5, allowed_after=two_tokens))
    loop.add(request("b", (1, 1), max_tokens=5))
    reasons = {}
    while (loop.may_plan and loop.plan() is not None) or loop.in_flight:
        if expelled := loop.scheduler.expel(loop.in_flight[0][1].failed):
            loop.answers["a"].drop()
            reasons |= expelled
        loop.commit()
    assert isinstance(reasons["a"], ConstraintError)
    assert "nothing is allowed" in str(reasons["a"])
    assert len(loop.answers["a"].token_ids) == 2
    loop.answers.pop("a")
    loop.compare()


def test_what_is_not_finite_is_not_blamed_on_the_constraint():
    loop = SyncLoop(depth=1)
    loop.add(request("a", (0, 1), max_tokens=5, allowed_after=two_of_three))
    plan = loop.plan()
    [reason] = loop.scheduler.expel([plan.slices[0].seq_id]).values()
    assert isinstance(reason, NonFiniteLogitsError)


def test_choices_have_a_constraint_each():
    loop = SyncLoop(depth=2, num_blocks=40)
    loop.add(request("a", (0, 1), max_tokens=6, n=3, temperature=1.0, seed=4, allowed_after=two_of_three))
    loop.drain()
    loop.compare()
    assert len({id(init.mask) for init in inits(loop)}) == 3


def test_bans_of_a_constrained_row_are_controls_so_that_the_mask_may_void_them():
    plain = request("a", (0,), stop_ids=frozenset({EOS}), min_tokens=2)
    bound = request("a", (0,), stop_ids=frozenset({EOS}), min_tokens=2, allowed_after=two_of_three)
    assert row_sampling(plain).controls is None
    assert row_sampling(bound).controls == RowControls()
    assert row_sampling(bound).banned_ids == (EOS,)
    assert row_sampling(request("a", (0,), allowed_after=two_of_three)).controls is None

"""Constrained sequences: when they are planned, with which masks, and what becomes of those that cannot go on."""

from math import inf

from aserve.core.errors import ConstraintError, NonFiniteLogitsError
from aserve.core.plan import RowControls
from aserve.scheduler.sequence import row_sampling
from tests.fakes import ids_of
from tests.scheduler.sync_loop import EOS, LETTERS, SyncLoop, request, two_of_three


def masks_of(plan):
    return {row: ids_of(mask.mask()) for row, mask in plan.masks}


def test_a_mask_comes_with_each_token_and_is_of_all_tokens_before_it():
    """Prompt in two chunks: the first samples nothing and needs no mask."""
    loop = SyncLoop(depth=1, max_num_batched_tokens=3)
    loop.add(request("a", (0, 1, 2, 0), max_tokens=3, allowed_after=two_of_three))
    loop.plan()
    assert loop.plans[-1].masks == ()
    loop.commit()
    said: list[int] = []
    for _ in range(3):
        plan = loop.plan()
        [piece] = plan.slices
        assert masks_of(plan) == {piece.row: two_of_three(said)}
        [delta] = loop.commit()
        said.extend(delta.token_ids)
    loop.compare()


def test_only_who_waits_for_a_token_waits():
    loop = SyncLoop(depth=2, num_blocks=30)
    loop.add(request("free", (0,), max_tokens=6))
    loop.add(request("bound", (1,), max_tokens=6, allowed_after=two_of_three))
    first, second = loop.plan(), loop.plan()
    assert [len(first.slices), len(first.masks)] == [2, 1]
    assert [[piece.seq_id for piece in second.slices], second.masks] == [[0], ()]
    loop.commit()
    third = loop.plan()
    assert [piece.seq_id for piece in third.slices] == [0, 1]
    assert [row for row, _ in third.masks] == [third.slices[1].row]
    loop.drain()
    loop.compare()


def test_who_finds_no_budget_or_no_room_has_no_mask():
    """Two rows, a token a step: the second is asked and not planned, and its constraint is not told twice."""
    loop = SyncLoop(depth=1, max_num_batched_tokens=1, num_blocks=6)
    for name in "ab":
        loop.add(request(name, (0, 1), max_tokens=5, allowed_after=two_of_three))
    while loop.step():
        for plan in loop.plans:
            assert {row for row, _ in plan.masks} <= {piece.row for piece in plan.slices if piece.num_samples}
    loop.compare()
    assert loop.scheduler.statistics().num_preemptions == 0


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


def test_a_constraint_follows_the_answer_back_and_forth():
    """A token that is taken back, by a commit that raised, is taken back from the constraint as well."""
    loop = SyncLoop(depth=1)
    loop.add(request("a", (0, 1), max_tokens=5, allowed_after=two_of_three))
    [sequence] = loop.scheduler._roster.sequences.values()
    first = min(two_of_three([]))
    sequence.token_ids.append(first)
    assert ids_of(sequence.constraint_now().mask()) == two_of_three([first])
    del sequence.token_ids[2:]
    assert ids_of(sequence.constraint_now().mask()) == two_of_three([])
    assert sequence.constraint_now().num_tokens == 0


def test_choices_have_a_constraint_each():
    loop = SyncLoop(depth=2, num_blocks=40)
    loop.add(request("a", (0, 1), max_tokens=6, n=3, temperature=1.0, seed=4, allowed_after=two_of_three))
    constraints = {id(sequence.constraint) for sequence in loop.scheduler._roster.sequences.values()}
    assert len(constraints) == 3
    loop.drain()
    loop.compare()


def test_bans_of_a_constrained_row_are_controls_so_that_the_mask_may_void_them():
    plain = request("a", (0,), stop_ids=frozenset({EOS}), min_tokens=2)
    bound = request("a", (0,), stop_ids=frozenset({EOS}), min_tokens=2, allowed_after=two_of_three)
    assert row_sampling(plain).controls is None
    assert row_sampling(bound).controls == RowControls()
    assert row_sampling(bound).banned_ids == (EOS,)
    assert row_sampling(request("a", (0,), allowed_after=two_of_three)).controls is None


def test_ignore_eos_bans_the_models_own_end_of_a_constrained_row_alone():
    bound = request("a", (0,), stop_ids=frozenset({EOS}), ignore_eos=True, allowed_after=two_of_three)
    controls = row_sampling(bound).controls
    assert controls is not None
    assert controls.logit_bias == ((EOS, -inf),)
    assert row_sampling(request("a", (0,), stop_ids=frozenset({EOS}), ignore_eos=True)).controls is None

"""The draft model's bookkeeping: whole steps, what is computed again, and who gives way when room is short."""

from aserve.core.config import Options
from aserve.core.ids import SeqId
from aserve.core.plan import TO_COME, SeqSlice
from aserve.core.speculation import SpeculativeConfig, StepSeconds
from aserve.drafters import draft_options
from aserve.drafting.draft_model import DraftModelProposer

A, B, C = SeqId(7), SeqId(8), SeqId(9)


def proposer_of(**sizes: int) -> DraftModelProposer:
    wanted = {"most": 3, "num_blocks": 9, "block_size": 2, "num_rows": 2, "context_len": 12, "max_catch_up": 100}
    return DraftModelProposer(**wanted | sizes, step_seconds=StepSeconds(0.5, 0.25))


def verified(seq_id: SeqId, token_ids: list[int], num_drafts: int) -> SeqSlice:
    """A slice of the large model's that has so many drafts made, behind the newest token."""
    drafted = (token_ids[-1], *[TO_COME] * num_drafts)
    return SeqSlice(seq_id, 3, len(token_ids) - 1, 1 + num_drafts, drafted, (), 1 + num_drafts)


def test_it_catches_up_then_goes_on_by_itself():
    proposer, tokens = proposer_of(), [1, 2, 3, 4, 5]
    assert proposer.propose(A, tokens, 3) == (TO_COME,) * 3
    steps = proposer.steps(11, [verified(A, tokens, 3)])
    assert [step.step_id for step in steps] == [11] * 3
    [init], row = steps[0].inits, steps[0].slices[0].row
    assert (init.row, init.seq_id, init.block_ids) == (row, A, ())
    assert [step.slices for step in steps] == [
        (SeqSlice(A, row, 0, 5, (1, 2, 3, 4, 5), (1, 2, 3, 4), 1),),
        (SeqSlice(A, row, 5, 1, (), (), 1),),
        (SeqSlice(A, row, 6, 1, (), (), 1),),
    ]
    # One draft was right. What was computed of drafts is computed again, right or wrong.
    tokens = [*tokens, 6, 7]
    assert proposer.propose(A, tokens, 1) == (TO_COME,)
    [step] = proposer.steps(12, [verified(A, tokens, 1)])
    assert step.inits == ()
    assert step.slices == (SeqSlice(A, row, 5, 2, (6, 7), (), 1),)


def test_sequences_of_one_plan_share_its_steps():
    proposer = proposer_of()
    assert proposer.propose(A, [1, 2], 3) == (TO_COME,) * 3
    assert proposer.propose(B, [5], 1) == (TO_COME,)
    first, *later = proposer.steps(
        0, [verified(B, [5], 1), verified(A, [1, 2], 2)]
    )  # a block was lacking for the third
    assert [(piece.seq_id, piece.token_ids, piece.num_samples) for piece in first.slices] == [
        (A, (1, 2), 1),
        (B, (5,), 1),
    ]
    assert [[piece.seq_id for piece in step.slices] for step in later] == [[A]]


def test_who_gets_no_draft_after_all_is_caught_up_with():
    proposer = proposer_of()
    proposer.propose(A, [1, 2, 3], 3)
    [step] = proposer.steps(0, [SeqSlice(A, 3, 2, 1, (), (), 1)])
    assert [(piece.num_tokens, piece.num_samples) for piece in step.slices] == [(3, 0)]
    proposer.propose(A, [1, 2, 3, 4], 1)
    [step] = proposer.steps(1, [verified(A, [1, 2, 3, 4], 1)])
    assert step.slices[0].token_ids == (4,)


def test_a_long_past_is_caught_up_with_over_several_plans():
    proposer, tokens = proposer_of(max_catch_up=4), [1, 2, 3, 4, 5, 6, 7]
    assert proposer.propose(A, tokens, 3) == ()
    assert proposer.propose(B, [1], 1) == (), "of this plan nothing is left"
    [step] = proposer.steps(0, [])
    assert step.slices[0].token_ids == (1, 2, 3, 4)
    assert proposer.propose(A, tokens, 1) == (TO_COME,)
    [step] = proposer.steps(1, [verified(A, tokens, 1)])
    assert (step.slices[0].start, step.slices[0].token_ids) == (4, (5, 6, 7))


def test_nothing_is_drafted_beyond_the_models_context():
    """12 positions: the last draft is sampled at position 11 and has none itself."""
    proposer = proposer_of(num_blocks=20)
    assert len(proposer.propose(A, [1] * 11, 3)) == 2
    assert len(proposer.propose(B, [1] * 12, 3)) == 1
    proposer.steps(0, [])
    assert proposer.propose(C, [1] * 13, 3) == ()


def test_who_was_drafted_longest_ago_gives_way_and_who_is_in_the_plan_does_not():
    proposer = proposer_of()
    for seq_id in (A, B):
        proposer.propose(seq_id, [1, 2], 1)
        proposer.steps(0, [verified(seq_id, [1, 2], 1)])
    assert proposer.propose(B, [1, 2, 3], 1) == (TO_COME,)
    assert proposer.propose(C, [4], 1) == (TO_COME,), "in A's row"
    assert proposer.propose(A, [1, 2, 3], 1) == (), "both rows are taken"
    slices = proposer.steps(1, [verified(B, [1, 2, 3], 1), verified(C, [4], 1)])[0].slices
    assert [(piece.seq_id, piece.start) for piece in slices] == [(B, 2), (C, 0)]


def test_blocks_that_are_short_are_taken_from_others_and_come_back():
    proposer = proposer_of(num_blocks=5)
    proposer.propose(A, [1] * 6, 1)
    proposer.steps(0, [verified(A, [1] * 6, 1)])
    assert proposer.propose(B, [2] * 7, 1) == (TO_COME,), "four blocks, which A had three of"
    proposer.steps(0, [verified(B, [2] * 7, 1)])
    assert proposer.propose(C, [3] * 9, 1) == (), "five blocks, which there are not"
    proposer.forget(B)
    proposer.forget(C)
    assert sorted(proposer._free_blocks) == [1, 2, 3, 4]
    assert sorted(proposer._free_rows) == [0, 1]


def test_who_was_forgotten_begins_anew():
    """Catches a row that goes on from what a step that failed has left in it."""
    proposer = proposer_of()
    proposer.propose(A, [1, 2, 3], 1)
    proposer.steps(0, [verified(A, [1, 2, 3], 1)])
    proposer.propose(A, [1, 2, 3, 4], 1)
    proposer.forget(A)
    assert proposer.steps(1, []) == (), "nor is it caught up with"
    proposer.propose(A, [1, 2, 3, 4], 1)
    [step] = proposer.steps(2, [verified(A, [1, 2, 3, 4], 1)])
    assert [init.seq_id for init in step.inits] == [A]
    assert (step.slices[0].start, step.slices[0].token_ids, len(step.slices[0].new_blocks)) == (0, (1, 2, 3, 4), 2)


def test_seconds_are_those_of_a_step_and_its_tokens():
    assert proposer_of().seconds(4) == 1.5


def test_the_draft_model_is_one_without_adapters_and_revision_of_its_own_length():
    wanted = SpeculativeConfig(method="draft_model", model="small")
    options = Options(
        model="large", revision="main", max_model_len=64, speculative_config=wanted, enable_lora=True, seed=3
    )
    assert draft_options(options) == Options(model="small", speculative_config=wanted, seed=3)
    assert draft_options(Options(model="large")) is None

"""Requests of several sequences: n, best_of, beams and forks. Blocks are of two positions."""

import pytest

from aserve.core.errors import ContextLengthError, InvalidRequestError
from aserve.core.outputs import FinishReason
from aserve.core.params import BeamParams
from aserve.core.plan import BlockOps, RowInit, SeqSlice
from tests.scheduler.sync_loop import EOS, SyncLoop, request

PROMPT = (0, 1, 2, 0, 1)
SAMPLED = {"temperature": 1.0, "seed": 5}
BEAMS = {"beam": BeamParams(width=2), "n": 2}


def drained(loop: SyncLoop) -> SyncLoop:
    loop.drain()
    loop.compare()
    return loop


def test_choices_share_full_blocks_and_copy_the_one_that_they_write():
    loop = SyncLoop(num_blocks=20)
    loop.add(request("a", (0, 1, 2, 0), max_tokens=4, n=3, **SAMPLED))
    first, second = loop.plan(), loop.plan()
    assert first is not None
    assert second is not None
    assert [piece.seq_id for piece in first.slices] == [0]  # the leader computes the prompt like anybody
    assert second.block_ops == BlockOps(copies=((2, 4), (2, 5)))
    assert [(init.seq_id, init.block_ids) for init in second.inits] == [(1, (1, 4)), (2, (1, 5))]
    assert second.slices == (
        SeqSlice(0, 0, start=4, num_tokens=1, new_blocks=(3,), num_samples=1),
        SeqSlice(1, 1, start=3, num_tokens=1, token_ids=(0,), num_samples=1),
        SeqSlice(2, 2, start=3, num_tokens=1, token_ids=(0,), num_samples=1),
    )
    assert [init.sampling.columns.seed for init in (*first.inits, *second.inits)] == [5, 6, 7]
    assert loop.scheduler.statistics().num_used_blocks == 5
    answers = drained(loop).answers["a"]
    assert len({tuple(choice.token_ids) for choice in answers.choices}) > 1


def test_nothing_is_copied_where_the_last_token_begins_a_block():
    loop = SyncLoop(num_blocks=20)
    loop.add(request("a", PROMPT, max_tokens=2, n=2, **SAMPLED))
    loop.plan()
    second = loop.plan()
    assert second is not None
    assert second.block_ops is None
    assert second.inits == (RowInit(1, 1, second.inits[0].sampling, (1, 2)),)
    assert second.slices[-1].new_blocks == (4,)
    drained(loop)


def test_a_choice_ends_alone_and_frees_its_blocks():
    loop = SyncLoop(num_blocks=20)
    loop.add(request("a", PROMPT, max_tokens=6, n=3, **SAMPLED))
    for _ in range(4):
        loop.step()
    num_used = loop.scheduler.statistics().num_used_blocks
    loop.finish("a", 1)
    assert loop.scheduler.statistics().num_used_blocks < num_used
    assert [choice.is_open for choice in loop.answers["a"].choices] == [True, False, True]
    drained(loop)


def test_more_choices_than_rows_take_turns():
    loop = SyncLoop(num_blocks=20, max_num_seqs=2)
    loop.add(request("a", PROMPT, max_tokens=4, n=4, **SAMPLED))
    drained(loop)


def test_choices_that_do_not_fit_together_take_turns():
    loop = SyncLoop(num_blocks=6, enable_prefix_caching=False)
    loop.add(request("a", PROMPT, max_tokens=4, n=4, **SAMPLED))
    drained(loop)


def test_another_requests_choices_give_way_together():
    loop = SyncLoop(num_blocks=11)
    loop.add(request("old", (0,) * 5, max_tokens=14))
    loop.add(request("new", (1,) * 5, max_tokens=5, n=3, **SAMPLED))
    while not loop.scheduler.statistics().num_preemptions:
        loop.step()
    assert loop.scheduler.statistics().num_running == 1
    drained(loop)


def test_best_of_gives_the_likeliest_once_all_have_ended():
    loop = SyncLoop(num_blocks=20)
    loop.add(request("a", PROMPT, max_tokens=5, n=2, best_of=4, **SAMPLED))
    drained(loop)
    first, second = (choice.last for choice in loop.answers["a"].choices)
    assert first is not None
    assert second is not None
    assert len(first.token_ids) == 5  # in one delta
    assert first.cumulative_logprob >= second.cumulative_logprob
    assert first.scores == ()  # nobody asked for them


def test_a_cancelled_group_gives_everything_back():
    loop = SyncLoop(num_blocks=20)
    for name, params in (("n", {"n": 3}), ("best", {"best_of": 3}), ("beam", BEAMS)):
        loop.add(request(name, PROMPT, max_tokens=6, **params))
    for _ in range(4):
        loop.step()
    for name in ("n", "best", "beam"):
        loop.cancel(name)
    assert loop.scheduler.statistics().num_used_blocks == 0


def test_beams_copy_only_where_two_go_on_from_one():
    loop = SyncLoop(num_blocks=20)
    loop.add(request("a", PROMPT, max_tokens=8, stop_ids=frozenset({EOS}), **BEAMS))
    drained(loop)
    num_takeovers = sum(len(plan.inits) for plan in loop.plans) - 2
    assert 0 < loop.scheduler.statistics().num_copied_blocks <= num_takeovers
    deltas = [choice.last for choice in loop.answers["a"].choices]
    assert {delta.finish_reason for delta in deltas if delta} <= {FinishReason.STOP, FinishReason.LENGTH}


def test_beams_that_cannot_all_run_are_refused_with_the_numbers():
    loop = SyncLoop(num_blocks=9, max_num_seqs=2)
    with pytest.raises(InvalidRequestError, match=r"at most the number of sequences that run at once \(2\), got 3"):
        loop.add(request("a", PROMPT, beam=BeamParams(width=3)))
    with pytest.raises(ContextLengthError, match="16 tokens, in which 2 beams can have 14 each, but the prompt has 14"):
        loop.add(request("a", (0,) * 14, **BEAMS))
    loop.add(request("a", (0,) * 13, max_tokens=9, **BEAMS))
    drained(loop)
    assert [len(choice.token_ids) for choice in loop.answers["a"].choices] == [1, 1]


def test_an_older_request_is_not_kept_waiting_by_beams_that_wait_for_each_other():
    loop = SyncLoop(num_blocks=7, max_num_seqs=2, enable_prefix_caching=False)
    loop.add(request("beams", PROMPT, max_tokens=4, arrival_s=2.0, **BEAMS))
    loop.plan()
    loop.add(request("older", (1,) * 9, max_tokens=2, arrival_s=1.0))
    drained(loop)


def test_branches_share_what_was_computed_and_go_their_own_ways():
    loop = SyncLoop(num_blocks=30, max_num_seqs=8)
    loop.add(request("a", PROMPT, max_tokens=9, **SAMPLED))
    for _ in range(4):
        loop.step()
    num_computed = sum(plan.num_tokens for plan in loop.plans)
    made = loop.fork("a", 0, [request(f"b{k}", (), 5, seed=k + 1, temperature=1.0) for k in range(2)])
    history = made[0].prompt_token_ids
    assert history[:5] == PROMPT
    assert len(history) > 5
    drained(loop)
    num_alone = 5 + 9 - 1  # prompt and answer, but for the last token
    assert sum(plan.num_tokens for plan in loop.plans) <= num_alone + 2 * 5
    assert num_computed < num_alone
    last = loop.answers["b0"].last
    assert last is not None
    assert last.num_cached_tokens == len(history) - 1


def test_a_finished_generation_can_be_continued_until_its_reader_leaves():
    loop = SyncLoop(num_blocks=20)
    loop.add(request("a", PROMPT, max_tokens=3))
    drained(loop)
    loop.fork("a", 0, [request("b", (), 3)])
    drained(loop)
    assert loop.answers["b"].last.num_cached_tokens == 6  # seven of its eight tokens were computed: three full blocks
    loop.cancel("a")
    with pytest.raises(InvalidRequestError, match="'a' has no choice 0"):
        loop.fork("a", 0, [request("c", (), 3)])


@pytest.mark.parametrize("params", [{"best_of": 3, "temperature": 1.0}, BEAMS])
def test_what_is_ranked_cannot_be_forked_not_even_when_it_has_ended(params):
    loop = SyncLoop(num_blocks=20)
    loop.add(request("a", PROMPT, max_tokens=3, **params))
    with pytest.raises(InvalidRequestError, match="cannot be forked"):
        loop.fork("a", 0, [request("b", (), 3)])
    drained(loop)
    with pytest.raises(InvalidRequestError, match="'a' has no choice 0"):
        loop.fork("a", 0, [request("b", (), 3)])


def test_a_branch_whose_prompt_is_scored_computes_all_of_it():
    """A branch on its origin's blocks would lack the scores of all that was computed before it."""
    loop = SyncLoop(num_blocks=20)
    loop.add(request("a", PROMPT, max_tokens=6))
    for _ in range(3):
        loop.step()
    loop.fork("a", 0, [request("b", (), 3, prompt_logprobs=1)])
    drained(loop)
    answer = loop.answers["b"]
    assert len(answer.choices[0].prompt_scores) == len(answer.request.prompt_token_ids) - 1 > len(PROMPT)


def test_if_one_branch_cannot_be_added_none_is():
    loop = SyncLoop(num_blocks=20)
    loop.add(request("a", PROMPT))
    with pytest.raises(InvalidRequestError, match="request id 'a' is in use"):
        loop.fork("a", 0, [request("b", (), 3), request("a", (), 3)])
    assert loop.scheduler.statistics().num_waiting == 1


def test_scores_come_with_their_tokens_and_the_prompts_once():
    loop = SyncLoop(max_num_batched_tokens=2, num_blocks=20)
    loop.add(request("warm", PROMPT, max_tokens=1))
    drained(loop)
    loop.add(request("a", PROMPT, max_tokens=4, n=2, logprobs=2, prompt_logprobs=1, **SAMPLED))
    drained(loop)
    assert loop.answers["a"].last.num_cached_tokens == 0  # cached blocks yield no scores
    assert [len(choice.prompt_scores) for choice in loop.answers["a"].choices] == [4, 0]


@pytest.mark.parametrize("seed", range(1, 9))
def test_a_prompts_scores_come_with_the_best_choice_whichever_that_is(seed):
    loop = SyncLoop(max_num_batched_tokens=2, num_blocks=20)
    loop.add(request("a", PROMPT, max_tokens=4, n=2, best_of=4, prompt_logprobs=1, temperature=1.0, seed=seed))
    drained(loop)
    assert [len(choice.prompt_scores) for choice in loop.answers["a"].choices] == [4, 0]

"""Several choices of a prompt from the demonstration model on a CPU, in float32: n, best_of, beams and forks."""

import asyncio

import pytest

from aserve.build import AsyncEngine
from aserve.core.errors import InvalidRequestError
from aserve.core.params import BeamParams, SamplingParams

pytestmark = pytest.mark.torch

PROMPT = "Once upon a time"
SEED = 11
SAMPLED = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def event_loop_runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def run(event_loop_runner):
    """Runs a coroutine function on the one engine of this module, which must hold nothing afterwards."""
    options = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 2**24}
    engine = event_loop_runner.run(AsyncEngine("demo", **options).__aenter__())

    def run(use):
        result = event_loop_runner.run(use(engine))
        statistics = engine.statistics()
        assert (statistics.num_used_blocks, statistics.num_running, statistics.num_waiting) == (0, 0, 0)
        return result

    yield run
    event_loop_runner.run(engine.aclose())


def sampled(**fields):
    return SamplingParams(**{**SAMPLED, "seed": SEED, **fields})


async def alone(engine, num, **fields):
    """The answers to seeds that follow each other, each asked for by itself."""
    return [await engine.complete(PROMPT, sampled(seed=SEED + k, **fields)) for k in range(num)]


async def tokens_of(mailbox):
    return tuple([token_id async for delta in mailbox for token_id in delta.token_ids])


def test_n_choices_are_those_of_n_seeds(run):
    async def use(engine):
        together = await engine.complete_n(PROMPT, sampled(n=4))
        return together, await alone(engine, 4)

    together, solo = run(use)
    assert [choice.token_ids for choice in together] == [answer.token_ids for answer in solo]
    assert [choice.text for choice in together] == [answer.text for answer in solo]
    assert [choice.index for choice in together] == [0, 1, 2, 3]
    assert len({choice.token_ids for choice in together}) == 4


def test_a_prompt_with_several_choices_is_computed_once(run):
    async def use(engine):
        prompt = (await engine.encode("A prompt that nobody has asked before. ")) * 8
        before = engine.statistics()
        async with engine.open(prompt, sampled(n=4, max_tokens=2)) as mailbox:
            deltas = [await anext(mailbox) for _ in range(4)]
            num_shared = engine.statistics().num_used_blocks
            deltas += [delta async for delta in mailbox]
        return len(prompt), deltas, num_shared, engine.statistics(), before, engine.config.block_size

    num_prompt, deltas, num_used, after, before, block_size = run(use)
    assert sum(len(delta.token_ids) for delta in deltas) == 4 * 2
    assert num_used <= num_prompt // block_size + 4, "full blocks are shared"
    assert after.num_copied_blocks > before.num_copied_blocks, "the last one is copied on write"


def test_best_of_ranks_by_cumulative_logprob(run):
    async def use(engine):
        best = await engine.complete_n(PROMPT, sampled(n=2, best_of=4))
        return best, await alone(engine, 4, logprobs=0), await engine.complete(PROMPT, sampled(best_of=4))

    best, solo, very_best = run(use)
    ranked = sorted(((sum(score.logprob for score in answer.scores), answer) for answer in solo), key=lambda it: -it[0])
    for choice, (logprob, answer) in zip(best, ranked, strict=False):
        assert choice.token_ids == answer.token_ids
        assert choice.cumulative_logprob == pytest.approx(logprob, abs=1e-4)
    assert very_best == best[0]


def test_complete_is_for_one_choice(run):
    async def use(engine):
        with pytest.raises(InvalidRequestError, match="use complete_n") as caught:
            await engine.complete(PROMPT, sampled(n=2))
        assert caught.value.param == "n"

    run(use)


def test_hypotheses_of_a_beam_search_are_likely_and_have_the_logprobs_that_the_model_gives_them(run):
    async def use(engine):
        prompt = await engine.encode(PROMPT)
        best = await engine.beam_search(PROMPT, BeamParams(width=4), max_tokens=10)
        (greedy,) = await engine.beam_search(prompt, BeamParams(width=1), max_tokens=10)
        scoring = SamplingParams(max_tokens=1, prompt_logprobs=0)
        scored = [await engine.complete((*prompt, *choice.token_ids), scoring) for choice in best]
        argmax = await engine.complete(prompt, SamplingParams(temperature=0.0, max_tokens=10))
        return best, greedy, [answer.prompt_scores[len(prompt) - 1 :] for answer in scored], argmax

    best, greedy, scores, argmax = run(use)
    assert greedy.token_ids == argmax.token_ids
    for choice, of_tokens in zip(best, scores, strict=True):
        assert choice.cumulative_logprob == pytest.approx(sum(score.logprob for score in of_tokens), abs=1e-3)
    means = [choice.cumulative_logprob / len(choice.token_ids) for choice in best]
    assert means == sorted(means, reverse=True)
    assert means[0] >= greedy.cumulative_logprob / len(greedy.token_ids) - 1e-5
    assert len({choice.token_ids for choice in best}) == 4


def test_a_beam_search_gives_as_many_as_asked_for(run):
    async def use(engine):
        beam = BeamParams(width=4, early_stopping="never")
        every = await engine.beam_search(PROMPT, beam, max_tokens=6)
        two = await engine.beam_search(PROMPT, beam, n=2, max_tokens=6)
        assert [choice.token_ids for choice in two] == [choice.token_ids for choice in every[:2]]
        with pytest.raises(InvalidRequestError, match="n must be at most the beam width"):
            await engine.beam_search(PROMPT, beam, n=5)

    run(use)


BRANCHES = [
    sampled(seed=1, max_tokens=5),
    sampled(seed=3, max_tokens=6),
    SamplingParams(temperature=0.0, max_tokens=4),
]


async def continuations(engine, history):
    """What each branch says after that history, asked for by itself."""
    return [(await engine.complete(history, params)).token_ids for params in BRANCHES]


def test_branches_of_a_finished_generation_go_their_own_ways(run):
    async def use(engine):
        history = list(await engine.encode(PROMPT))
        async with engine.open(PROMPT, sampled(max_tokens=8)) as origin:
            history += await tokens_of(origin)
            async with engine.fork(origin, BRANCHES) as mailboxes:
                answers = await asyncio.gather(*map(tokens_of, mailboxes))
        return answers, await continuations(engine, history)

    answers, expected = run(use)
    assert answers == expected
    assert len({answer[:4] for answer in answers}) > 1


def test_branches_of_a_running_generation_leave_it_alone(run):
    async def use(engine):
        prompt = await engine.encode(PROMPT)
        async with engine.open(PROMPT, sampled(max_tokens=20)) as origin:
            begun = (await anext(origin)).token_ids
            assert engine.statistics().num_running == 1
            async with engine.fork(origin, BRANCHES) as mailboxes:
                told, *answers = await asyncio.gather(*map(tokens_of, (origin, *mailboxes)))
        history = (*prompt, *begun, *told)
        undisturbed = (await engine.complete(PROMPT, sampled(max_tokens=20))).token_ids
        branch_points = range(len(prompt) + len(begun), len(prompt) + len(begun) + 4)
        return begun + told, undisturbed, answers, [await continuations(engine, history[:at]) for at in branch_points]

    told, undisturbed, answers, expected = run(use)
    assert told == undisturbed
    assert answers in expected


@pytest.mark.parametrize("ranked", [{"beam": BeamParams(width=2), "n": 2}, {"best_of": 2}], ids=["beams", "best_of"])
def test_what_is_ranked_is_not_forked_whether_it_runs_or_has_ended(run, ranked):
    """Catches an answer that speaks of a choice that is not there, which tells nobody what is wrong."""

    async def use(engine):
        async with engine.open(PROMPT, sampled(max_tokens=2, **ranked)) as origin:
            for _ in range(2):
                with pytest.raises(InvalidRequestError, match="ranked choices and beams cannot be forked"):
                    async with engine.fork(origin, 1):
                        pass
                await tokens_of(origin)

    run(use)


def test_a_branch_may_have_several_choices_itself(run):
    async def use(engine):
        async with engine.open(PROMPT, sampled(n=2, max_tokens=4)) as origin:
            deltas = [delta async for delta in origin]
            branch = sampled(n=3, max_tokens=5)
            async with engine.fork(origin, [branch], index=1) as (mailbox,):
                choices = [[], [], []]
                async for delta in mailbox:
                    choices[delta.index] += delta.token_ids
        history = list(await engine.encode(PROMPT))
        history += [token_id for delta in deltas if delta.index == 1 for token_id in delta.token_ids]
        return choices, await engine.complete_n(history, branch)

    choices, expected = run(use)
    assert choices == [list(choice.token_ids) for choice in expected]

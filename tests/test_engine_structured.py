"""A structure beside everything else that a request may ask for, on the demonstration model on a CPU, in float32.

Each answer is what it is when it is asked for alone, and keeps to the structure.
"""

import asyncio
import json
import re

import pytest

from aserve.build import AsyncEngine
from aserve.core.errors import InvalidRequestError
from aserve.core.outputs import Completion, FinishReason
from aserve.core.params import BeamParams, SamplingParams
from aserve.core.structured import StructuredOutputs

pytestmark = [pytest.mark.torch, pytest.mark.slow]

PROMPT = "Answer with JSON: "
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}
JSON = StructuredOutputs(json=SCHEMA)
DIGITS = StructuredOutputs(regex="[0-9]+(,[0-9]+)*")


@pytest.fixture(scope="module")
def event_loop_runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def run(event_loop_runner):
    """Runs a coroutine function on the one engine of this module, which must hold nothing afterwards."""
    options = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 2**24, "max_model_len": 512}
    engine = event_loop_runner.run(AsyncEngine("demo", **options).__aenter__())

    def run(use):
        result = event_loop_runner.run(use(engine))
        statistics = engine.statistics()
        assert (statistics.num_used_blocks, statistics.num_running, statistics.num_waiting) == (0, 0, 0)
        return result

    yield run
    event_loop_runner.run(engine.aclose())


def params(structured: StructuredOutputs = JSON, **fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 300, "structured": structured, **fields})


def check(completion: Completion) -> None:
    assert completion.finish_reason is FinishReason.STOP
    found = json.loads(completion.text)
    assert list(found) == ["name", "tags", "age"]
    assert 1 <= len(found["tags"]) <= 3
    assert 0 <= found["age"] <= 150


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0},
        {"top_k": 5, "top_p": 0.9},
        {"presence_penalty": 2.0, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
        {"logprobs": 3, "prompt_logprobs": 1},
        {"logit_bias": {5: 3.0}},
        {"min_tokens": 40},
        {"ignore_eos": True},
        {"bad_words": ["red"]},
    ],
    ids=str,
)
def test_beside_others_each_answer_is_what_it_is_alone(run, fields):
    """Unconstrained neighbours run ahead, constrained ones wait: neither may change a token of the other."""

    async def use(engine):
        solo = await engine.complete(PROMPT, params(**fields))
        free = SamplingParams(temperature=1.0, seed=8, max_tokens=60, ignore_eos=True)
        free_solo = await engine.complete("Once upon a time", free)
        crowd = await asyncio.gather(
            engine.complete("Once upon a time", free),
            *(engine.complete(PROMPT, params(**{**fields, "seed": seed})) for seed in (3, 4, 5)),
            engine.complete("One day", SamplingParams(max_tokens=30, seed=1)),
        )
        return solo, free_solo, crowd

    solo, free_solo, crowd = run(use)
    assert crowd[0].token_ids == free_solo.token_ids
    assert crowd[1].token_ids == solo.token_ids
    assert crowd[1].scores == solo.scores
    for completion in crowd[1:4]:
        check(completion)


def test_scores_are_the_models_own_and_not_those_of_what_is_left(run):
    async def use(engine):
        return await engine.complete(PROMPT, params(StructuredOutputs(choice=("zebra",)), logprobs=2))

    completion = run(use)
    assert completion.text == "zebra"
    assert all(score.logprob < -0.01 for score in completion.scores), "the mask left one token a step"


def test_choices_are_those_of_their_seeds(run):
    async def use(engine):
        together = await engine.complete_n(PROMPT, params(n=3))
        solo = [await engine.complete(PROMPT, params(seed=3 + k)) for k in range(3)]
        ranked = await engine.complete_n(PROMPT, params(n=2, best_of=4))
        return together, solo, ranked

    together, solo, ranked = run(use)
    assert [choice.token_ids for choice in together] == [answer.token_ids for answer in solo]
    for completion in (*together, *ranked):
        check(completion)
    assert ranked[0].cumulative_logprob >= ranked[1].cumulative_logprob


def test_an_answer_cut_by_length_is_a_beginning(run):
    async def use(engine):
        return [await engine.complete(PROMPT, params(max_tokens=n)) for n in (9, 300)]

    cut, whole = run(use)
    assert cut.finish_reason is FinishReason.LENGTH
    assert whole.text.startswith(cut.text)
    check(whole)


def test_min_tokens_holds_while_the_structure_can_go_on_and_no_longer(run):
    async def use(engine):
        long = await engine.complete("1, 2, ", params(DIGITS, min_tokens=30, max_tokens=40, temperature=0.0))
        short = await engine.complete(PROMPT, params(StructuredOutputs(choice=("yes", "no")), min_tokens=30))
        return long, short

    long, short = run(use)
    assert len(long.token_ids) >= 30
    assert short.text in ("yes", "no")
    assert short.finish_reason is FinishReason.STOP


def test_ignore_eos_goes_on_while_the_structure_can(run):
    async def use(engine):
        return [
            await engine.complete("1, 2, ", params(DIGITS, ignore_eos=True, max_tokens=25)),
            await engine.complete(PROMPT, params(ignore_eos=True)),
        ]

    digits, whole = run(use)
    assert digits.finish_reason is FinishReason.LENGTH
    assert re.fullmatch(r"[0-9]+(,[0-9]+)*,?", digits.text)
    check(whole)


def test_a_stop_string_cuts_what_it_finds(run):
    async def use(engine):
        return await engine.complete(PROMPT, params(stop=['"tags"']))

    completion = run(use)
    assert completion.stop_reason == '"tags"'
    assert completion.text.startswith("{")
    assert '"tags"' not in completion.text


def test_a_fork_goes_on_in_the_structure_or_begins_another(run):
    async def use(engine):
        async with engine.open(PROMPT, params()) as mailbox:
            begun = ""
            async for delta in mailbox:
                begun += delta.text
                if len(begun) > 3:
                    break
            branches = [params(seed=10), params(seed=11), params(StructuredOutputs(choice=("a", "b")))]
            async with engine.fork(mailbox, branches) as mailboxes:
                texts = ["".join([delta.text async for delta in branch]) for branch in mailboxes]
                history = mailboxes[0].prompt_token_ids
        prompt = await engine.encode(PROMPT)
        return await engine.decode(history[len(prompt) :]), texts

    begun, (first, second, other) = run(use)
    for rest in (first, second):
        found = json.loads(begun + rest)
        assert list(found) == ["name", "tags", "age"]
    assert other in ("a", "b")


def test_beams_are_refused():
    with pytest.raises(InvalidRequestError, match="structured does not work with beam search"):
        SamplingParams(structured=JSON, beam=BeamParams(width=2))


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_answers_are_what_they_are_alone(event_loop_runner, preemption):
    """So little memory that they take turns."""
    options = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "preemption_mode": preemption}
    if preemption == "swap":
        options["swap_space"] = 0.05
    seeds = range(8)

    async def answers(kv_cache_memory_bytes):
        async with AsyncEngine("demo", kv_cache_memory_bytes=kv_cache_memory_bytes, **options) as engine:
            done = await asyncio.gather(*(engine.complete(PROMPT, params(seed=seed)) for seed in seeds))
            return [completion.token_ids for completion in done], engine.statistics().num_preemptions, done

    roomy, none, done = event_loop_runner.run(answers(2**24))
    for completion in done:
        check(completion)
    tight, num_preemptions, _ = event_loop_runner.run(answers(17 * 2**15))  # one of full length, and the null block
    assert none == 0
    assert num_preemptions > 0
    assert tight == roomy

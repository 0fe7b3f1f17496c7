"""Answers with a structure are the same with drafts as without: with those that it forces, and with a proposer's.

On the demonstration model, in float32: tokens, texts, scores and ends, whatever else a request asks for.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partialmethod
from pathlib import Path

import pytest

import aserve
from aserve import LLM, Completion, SamplingParams, StructuredOutputs
from aserve.core.ids import SeqId
from aserve.drafting.ngram import NgramProposer
from aserve.scheduler.drafting import Drafter
from aserve.scheduler.foresight import Foresight
from aserve.text.tokenizer import Tokenizer
from tests.test_speculation import same

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SCHEMA = {
    "type": "object",
    "properties": {
        "temperature_in_celsius": {"type": "integer", "minimum": -50, "maximum": 50},
        "description": {"enum": ["clear and sunny all day", "light rain in the evening", "heavy snow"]},
        "station": {"type": "string", "maxLength": 12},
        "measurements": {
            "type": "array",
            "items": {"enum": ["humidity_percent", "wind_speed"]},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["temperature_in_celsius", "description", "station", "measurements"],
    "additionalProperties": False,
}
JSON = StructuredOutputs(json=SCHEMA)
TAG = {"begin": "<call>weather_in_the_city(", "schema": {"enum": ["Amsterdam", "Rotterdam"]}, "end": ")</call>"}
TAGS = StructuredOutputs(structural_tag={"structures": [TAG], "triggers": ["<"]})
TOKENIZER = Tokenizer.load(Path(aserve.__file__).parent / "demo")
[SPACE_ID], [TRIGGER_ID] = (TOKENIZER.encode(text, add_special_tokens=False) for text in " <")
PROMPTS = [
    "Answer with JSON: ",
    "The weather, as an object: ",
    'Repeat: {"temperature_in_celsius": 3, "description": "heavy snow"}',
]
PARAMS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 1.2, "top_p": 0.9, "top_k": 40, "seed": 6},
    "scored": {"temperature": 0.7, "seed": 1, "logprobs": 2, "prompt_logprobs": 1},
    "penalties": {"temperature": 0.8, "seed": 3, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "several": {"temperature": 0.9, "seed": 2, "n": 3},
    "best": {"temperature": 0.9, "seed": 3, "n": 2, "best_of": 3},
    "cut": {"temperature": 1.0, "seed": 4, "max_tokens": 11},
    "stopped": {"temperature": 1.0, "seed": 7, "stop": ["crip"], "include_stop_str_in_output": True},
    "stop token": {"temperature": 1.0, "seed": 7, "stop_token_ids": [86]},
    "least": {"temperature": 1.0, "seed": 8, "min_tokens": 60},
    "tags": {"temperature": 1.0, "seed": 9, "structured": TAGS, "max_tokens": 40, "logit_bias": {TRIGGER_ID: 9.0}},
}
RARELY_WRONG = ("scored", "cut", "least", "tags")
"""Where few places are open, and no wrong guess falls on one."""
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
TIGHT = {"max_model_len": 256, "kv_cache_memory_bytes": 68 * 2**13, "swap_space": 0.01, "block_size": 8}


def answers(llm: LLM, **params: object) -> list[Completion]:
    wanted = SamplingParams(**{"max_tokens": 120, "structured": JSON} | params)  # type: ignore[arg-type]
    return llm.generate(PROMPTS, wanted, use_tqdm=False)


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM("demo", dtype="float32") as llm:
        yield llm


@pytest.fixture(scope="module")
def guessing() -> Iterator[LLM]:
    with LLM("demo", dtype="float32", speculative_config=SPECULATIVE) as llm:
        yield llm


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Which drafts there are: "none", or "forced" ones, however little they pay."""
    forced = Foresight.forced

    def choose(kind: str) -> None:
        monkeypatch.setattr(Drafter, "_price", lambda *_: 1.0 if kind == "none" else 0.0)
        monkeypatch.setattr(Foresight, "forced", (lambda *_: ()) if kind == "guessed" else forced)

    return choose


def num_drafts(llm: LLM) -> tuple[int, int]:
    statistics = llm.statistics()
    return statistics.num_drafts, sum(statistics.num_accepted_by_position)


@pytest.mark.parametrize("kind", PARAMS)
def test_what_a_structure_forces_changes_no_answer_when_it_is_drafted(
    plain: LLM, drafting: Callable[[str], None], kind: str
) -> None:
    drafting("none")
    before = num_drafts(plain)
    expected = answers(plain, **PARAMS[kind])
    assert num_drafts(plain) == before
    drafting("forced")
    for one, other in zip(answers(plain, **PARAMS[kind]), expected, strict=True):
        same(one, other)
    num_made, num_accepted = (after - then for after, then in zip(num_drafts(plain), before, strict=True))
    assert 5 < num_accepted <= num_made


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_what_is_forced_is_certain_whatever_the_model_would_say(drafting: Callable[[str], None], kind: str) -> None:
    """Random weights."""
    with LLM("demo", dtype="float32", load_format="dummy") as llm:
        drafting("none")
        expected = answers(llm, **PARAMS[kind])
        drafting("forced")
        for one, other in zip(answers(llm, **PARAMS[kind]), expected, strict=True):
            same(one, other)
        num_made, num_accepted = num_drafts(llm)
        assert num_made == num_accepted > 20


class Prophet:
    """Guesses what comes, having seen it, but for every fifth token; in place of `NgramProposer.propose`.

    That is a space, which a structure allows in many places.
    """

    def __init__(self, completions: list[Completion]) -> None:
        self._known = [completion.prompt_token_ids + completion.token_ids for completion in completions]

    def __call__(
        self, _proposer: NgramProposer, _seq_id: SeqId, token_ids: Sequence[int], most: int
    ) -> tuple[int, ...]:
        position, past = len(token_ids), tuple(token_ids)
        future = next((known[position : position + most] for known in self._known if known[:position] == past), ())
        return tuple(token_id if place % 5 else SPACE_ID for place, token_id in enumerate(future, start=position))


@pytest.mark.parametrize("kind", PARAMS)
def test_guesses_under_a_structure_change_no_answer(
    plain: LLM, guessing: LLM, drafting: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Right guesses and wrong ones, among them some that the structure does not allow."""
    drafting("none")
    expected = answers(plain, **PARAMS[kind])
    drafting("guessed")
    monkeypatch.setattr(NgramProposer, "propose", partialmethod(Prophet(expected)))
    before = num_drafts(guessing)
    for one, other in zip(answers(guessing, **PARAMS[kind]), expected, strict=True):
        same(one, other)
    num_made, num_accepted = (after - then for after, then in zip(num_drafts(guessing), before, strict=True))
    assert num_accepted > 5
    assert num_accepted < num_made or kind in RARELY_WRONG


def test_drafts_under_a_structure_change_no_answer_where_memory_is_short(
    plain: LLM, drafting: Callable[[str], None]
) -> None:
    """Rows that are set up anew know what was accepted, and nothing of what was not."""
    drafting("none")
    expected = answers(plain, **PARAMS["several"])
    drafting("forced")
    with LLM("demo", dtype="float32", speculative_config=SPECULATIVE, **TIGHT) as llm:
        found = answers(llm, **PARAMS["several"])
        statistics = llm.statistics()
    assert [completion.token_ids for completion in found] == [completion.token_ids for completion in expected]
    assert statistics.num_preemptions > 0
    assert sum(statistics.num_accepted_by_position) > 20

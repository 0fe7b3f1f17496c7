"""Drafts through a whole engine on the demonstration model: no token, score or text differs from those without."""

from collections.abc import Sequence
from functools import partialmethod

import pytest

from aserve import LLM, SamplingParams
from aserve.core.ids import SeqId
from aserve.core.outputs import Completion
from aserve.drafting.ngram import NgramProposer
from aserve.scheduler.drafting import Drafter

pytestmark = [pytest.mark.torch, pytest.mark.slow]

TEXT = "Pack my box with five dozen liquor jugs. The quick brown fox jumps over the lazy dog. "
PROMPTS = [
    f"Repeat: {TEXT * 3}\nPack my box",
    f"{TEXT}{TEXT}The quick brown",
    "Once upon a time there was a fox",
    "a b c d e f a b c d e f a b c",
    "What is paged attention?",
]
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
"""Single tokens are looked up, so that many guesses are wrong."""
PARAMS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "seed": 5},
    "filtered": {"temperature": 1.2, "top_p": 0.8, "top_k": 20, "min_p": 0.01, "seed": 6},
    "scored": {"temperature": 0.7, "seed": 1, "logprobs": 2, "prompt_logprobs": 1},
    "penalties": {"temperature": 0.0, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "repetition": {"temperature": 0.9, "seed": 7, "repetition_penalty": 1.3, "logprobs": 1},
    "biased": {"temperature": 0.8, "seed": 8, "logit_bias": {40: 4.0, 50: -9.0}, "min_tokens": 20},
    "words": {"temperature": 0.7, "seed": 9, "bad_words": ["the", " a fox"], "frequency_penalty": 0.3, "n": 2},
    "several": {"temperature": 0.9, "seed": 2, "n": 3},
    "best": {"temperature": 0.9, "seed": 3, "n": 2, "best_of": 3},
    "stopped": {"temperature": 0.0, "stop": ["o"], "min_tokens": 4, "ignore_eos": False},
}
TIGHT = {"max_model_len": 256, "kv_cache_memory_bytes": 50 * 2**13, "swap_space": 0.01, "block_size": 8}


def answers(llm: LLM, **params: object) -> list[Completion]:
    wanted = SamplingParams(**{"max_tokens": 48, "ignore_eos": True} | params)  # type: ignore[arg-type]
    return llm.generate(PROMPTS, wanted, use_tqdm=False)


@pytest.fixture(scope="module")
def plain():
    with LLM("demo") as llm:
        yield llm


@pytest.fixture(scope="module")
def guessing():
    with LLM("demo", speculative_config=SPECULATIVE) as llm:
        yield llm


def same(one: Completion, other: Completion) -> None:
    """Equal in all that a reader sees; log-probabilities to the bits that a float32 sum may lose."""
    assert (one.token_ids, one.text, one.finish_reason, one.stop_reason, one.index) == (
        *(other.token_ids, other.text, other.finish_reason, other.stop_reason, other.index),
    )
    for scores, others in ((one.scores, other.scores), (one.prompt_scores, other.prompt_scores)):
        assert [score.top_ids for score in scores] == [score.top_ids for score in others]
        assert [score.logprob for score in scores] == pytest.approx([score.logprob for score in others], abs=1e-5)


class Prophet:
    """Guesses what comes, having seen it, but for every fifth token; in place of `NgramProposer.propose`."""

    def __init__(self, completions: list[Completion]) -> None:
        self._known = [completion.prompt_token_ids + completion.token_ids for completion in completions]

    def __call__(
        self, _proposer: NgramProposer, _seq_id: SeqId, token_ids: Sequence[int], most: int
    ) -> tuple[int, ...]:
        """None for choices that are not told."""
        position, past = len(token_ids), tuple(token_ids)
        future = next((known[position : position + most] for known in self._known if known[:position] == past), ())
        return tuple(token_id if place % 5 else token_id // 2 for place, token_id in enumerate(future, start=position))


@pytest.fixture
def prophesy(monkeypatch):
    """Guesses are those of the completions that were seen, and worth it whatever steps take."""
    monkeypatch.setattr(Drafter, "_price", lambda _drafter, _sequence, _num_rows: 0.0)
    return lambda seen: monkeypatch.setattr(NgramProposer, "propose", partialmethod(Prophet(seen)))


@pytest.mark.parametrize("kind", PARAMS)
def test_drafts_change_no_answer(plain, guessing, prophesy, kind):
    expected = answers(plain, **PARAMS[kind])
    prophesy(expected)
    before = guessing.statistics()
    for one, other in zip(answers(guessing, **PARAMS[kind]), expected, strict=True):
        same(one, other)
    after = guessing.statistics()
    num_drafts = after.num_drafts - before.num_drafts
    num_accepted = sum(after.num_accepted_by_position) - sum(before.num_accepted_by_position)
    assert 0.3 * num_drafts < num_accepted < num_drafts, "drafts of both kinds were verified"
    assert num_drafts > 10


@pytest.mark.parametrize("kind", ["greedy", "sampled", "penalties", "words"])
def test_drafts_change_no_answer_where_memory_is_short(plain, prophesy, kind):
    expected = answers(plain, **PARAMS[kind])
    prophesy(expected)
    with LLM("demo", speculative_config=SPECULATIVE, **TIGHT) as llm:
        found = answers(llm, **PARAMS[kind])
        statistics = llm.statistics()
    assert [completion.token_ids for completion in found] == [completion.token_ids for completion in expected]
    assert statistics.num_preemptions > 0
    assert sum(statistics.num_accepted_by_position) > 20

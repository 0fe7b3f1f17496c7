"""Drafts through a whole engine on the demonstration model: no token, score or text differs from those without."""

import asyncio
import json
import shutil
from collections.abc import Sequence
from functools import partialmethod

import pytest
from safetensors.torch import load_file, save_file

from aserve import LLM, AsyncEngine, SamplingParams
from aserve.core.errors import ConfigError
from aserve.core.ids import SeqId
from aserve.core.outputs import Completion
from aserve.drafting.ngram import NgramProposer
from aserve.model_folder import DEMO_FOLDER
from aserve.scheduler.drafting import Drafter
from tests.checkpoints import write_checkpoint

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


@pytest.fixture(scope="module")
def shrunken(tmp_path_factory):
    """The demonstration model without its last two layers: a draft model that is often right, and often wrong."""
    folder = tmp_path_factory.mktemp("shrunken")
    for file in DEMO_FOLDER.iterdir():
        shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    num_layers = config["num_hidden_layers"] = config["num_hidden_layers"] - 2
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    beyond = tuple(f"model.layers.{layer}." for layer in range(num_layers, num_layers + 2))
    kept = {name: weight for name, weight in weights.items() if not name.startswith(beyond)}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors")
    return str(folder)


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
    monkeypatch.setattr(Drafter, "_price", lambda *_: 0.0)
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


@pytest.fixture(scope="module")
def small_drafts(shrunken):
    speculative = {"method": "draft_model", "model": shrunken, "num_speculative_tokens": 4}
    with LLM("demo", speculative_config=speculative) as llm:
        yield llm


@pytest.mark.parametrize("kind", PARAMS)
def test_a_draft_model_changes_no_answer(plain, small_drafts, monkeypatch, kind):
    monkeypatch.setattr(Drafter, "_price", lambda *_: 0.0)
    before = small_drafts.statistics()
    for one, other in zip(
        answers(small_drafts, **PARAMS[kind]), expected := answers(plain, **PARAMS[kind]), strict=True
    ):
        same(one, other)
    after = small_drafts.statistics()
    num_drafts = after.num_drafts - before.num_drafts
    num_accepted = sum(after.num_accepted_by_position) - sum(before.num_accepted_by_position)
    assert num_drafts > len(expected) * 10
    assert 0 < num_accepted < num_drafts, "drafts of both kinds were verified"


@pytest.mark.parametrize("kind", ["greedy", "words"])
def test_a_draft_model_changes_no_answer_where_memory_is_short(plain, shrunken, monkeypatch, kind):
    monkeypatch.setattr(Drafter, "_price", lambda *_: 0.0)
    expected = answers(plain, **PARAMS[kind])
    speculative = {"method": "draft_model", "model": shrunken, "num_speculative_tokens": 4}
    tight = TIGHT | {"kv_cache_memory_bytes": 75 * 2**13}  # of which the draft model has a third
    with LLM("demo", speculative_config=speculative, **tight) as llm:
        found = answers(llm, **PARAMS[kind])
        statistics = llm.statistics()
    assert [completion.token_ids for completion in found] == [completion.token_ids for completion in expected]
    assert statistics.num_preemptions > 0
    assert sum(statistics.num_accepted_by_position) > 20


def test_the_model_as_its_own_draft_model_is_always_right(monkeypatch):
    """Catches a draft model that has seen another past than its sequence's, and drafts that are compared amiss."""
    monkeypatch.setattr(Drafter, "_price", lambda *_: 0.0)
    with LLM("demo", speculative_config={"model": "demo", "num_speculative_tokens": 4}, dtype="float32") as llm:
        answers(llm, temperature=0.0)
        answers(llm, temperature=0.0)  # what the prefix cache has, the draft model has to compute
        statistics = llm.statistics()
    assert statistics.num_drafts == sum(statistics.num_accepted_by_position) > 200


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path):
    other = write_checkpoint(tmp_path / "other", "llama", vocab_size=2048)
    with pytest.raises(ConfigError, match=r"speculative_config: the draft model .* has \d+ tokens, the model 2048"):
        LLM("demo", speculative_config={"model": str(write_checkpoint(tmp_path / "small", "llama"))})
    with pytest.raises(ConfigError, match=r"speculative_config: token \d+ is '.*' to the draft model .*one vocabulary"):
        LLM("demo", speculative_config={"model": str(other)})


def test_the_draft_models_cache_is_a_part_of_the_memory_that_is_planned():
    """A model beside itself takes half of it."""

    async def planned(**options: object) -> tuple[int, list[str]]:
        async with AsyncEngine("demo", kv_cache_memory_bytes=2**22, **options) as engine:  # type: ignore[arg-type]
            return engine.statistics().num_blocks, engine.startup_lines()

    alone, lines = asyncio.run(planned())
    beside, drafted_lines = asyncio.run(planned(speculative_config={"model": "demo"}))
    assert 0.49 * alone < beside < 0.51 * alone
    assert [line for line in drafted_lines if line.startswith("draft model: demo, ") and "of KV cache" in line]
    assert not any(line.startswith("draft model") for line in lines)

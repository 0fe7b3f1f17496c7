"""Every two features together: what a request with both gets in a crowd, under their conditions, is what it gets alone.

A feature changes what a request asks for, how it is asked (as a branch of another, say), or what it runs under: drafts,
preemption, a prefix that is cached, layers with windows. Alone means on an engine with memory to spare, without drafts
and without a prefix cache. What two features refuse to do together they refuse by name. Bits are compared, not numbers
that are nearly equal, and each condition has to have come over the very request that is compared.

    python -m pytest -m thorough tests/test_combinations.py        three at once, and other seeds
"""

import asyncio
import gc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pytest

from aserve import AsyncEngine, BeamParams, Completion, SamplingParams, StructuredOutputs
from aserve.core.errors import InvalidRequestError
from aserve.core.ids import SeqId
from aserve.core.outputs import FinishReason, Transcript
from aserve.core.plan import SeqSlice
from aserve.drafting.ngram import NgramProposer
from aserve.mailbox import Mailbox
from aserve.scheduler.drafting import Drafter
from aserve.scheduler.preemption import PreemptionRule
from aserve.scheduler.residents import Residents
from aserve.scheduler.sequence import Sequence as Row
from aserve.scheduler.states import State
from tests.adapters import write_adapter
from tests.checkpoints import write_checkpoint

pytestmark = [pytest.mark.torch, pytest.mark.slow]

Combination = tuple[str, ...]

SCHEMA: Final = {
    "type": "object",
    "properties": {"temperature": {"type": "integer"}, "words": {"type": "array", "items": {"enum": ["red", "green"]}}},
    "required": ["temperature", "words"],
    "additionalProperties": False,
}
ASKED: Final[Mapping[str, Mapping[str, Any]]] = {
    "constraint": {"structured": StructuredOutputs(json=SCHEMA)},
    "n": {"n": 3},
    "beams": {"beam": BeamParams(width=3), "n": 3},
    "logprobs": {"logprobs": 2},
    "prompt logprobs": {"prompt_logprobs": 1},
    "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "seed": {"temperature": 0.9, "seed": 7},
}
"""What a feature changes of the parameters. Who stops does so at a character that the answer has late."""
CONDITIONS: Final = ("drafts", "recomputed", "swapped", "windows")
"""What an engine is made for. Besides: "alone", and "beams", which with windows have to fit where memory is short."""
TIGHT: Final = frozenset(("recomputed", "swapped"))
FEATURES: Final = (*ASKED, "stop", "adapter", "fork", "prefix", *CONDITIONS)
REFUSED: Final = {
    frozenset(("beams", "constraint")): "structured does not work with beam search",
    frozenset(("beams", "logprobs")): "logprobs does not work with beam search",
    frozenset(("beams", "prompt logprobs")): "prompt_logprobs does not work with beam search",
    frozenset(("beams", "fork")): "ranked choices and beams cannot be forked",
}
VAIN: Final = frozenset(
    [
        frozenset(("beams", "drafts")),  # the search chooses
        frozenset(("beams", "swapped")),  # beams are computed again: they wait for each other
        frozenset(("prompt logprobs", "prefix")),  # what is to be scored is computed
        frozenset(("prompt logprobs", "fork")),
    ]
)
"""Conditions that do not come over who has the other feature."""
PAIRS: Final = tuple(combinations(FEATURES, 2))
PROMPT: Final = tuple(range(40, 80))
WINDOW: Final = 24
NUM_TOKENS: Final = 32
LATE: Final = 14
"""Tokens that an answer has before it stops, and an origin at most when it is forked."""
BLOCK_BYTES: Final = 2048
"""Of 8 positions, in all layers."""


def refusal(combination: Combination) -> str:
    """What it says, in one of the ways that there are; "" where nothing is refused."""
    return "|".join(words for pair, words in REFUSED.items() if pair <= set(combination))


# ---- engines


class Engines:
    """One for each set of conditions, made when it is needed, on one event loop."""

    def __init__(self, root: Path, num_ranks: int = 1, cache_dtype: str = "auto") -> None:
        """num_ranks: of all engines but those that do nothing else. cache_dtype: of all of them."""
        self._num_ranks, self._cache_dtype = num_ranks, cache_dtype
        gc.freeze()  # else each engine that closes has all that pytest and transformers hold walked through
        self._runner = asyncio.Runner()
        self._made: dict[frozenset[str], AsyncEngine] = {}
        self._models = {recipe: write_checkpoint(root / recipe, recipe) for recipe in ("qwen2", "qwen2_windows")}
        self._alone: dict[str, list[Completion]] = {}
        self._adapters = {
            name: write_adapter(root / name, self._models["qwen2"], seed=seed, size=0.6)
            for seed, name in enumerate("ab")
        }

    def run(self, work: Any) -> Any:
        return self._runner.run(work)

    async def of(self, conditions: frozenset[str]) -> AsyncEngine:
        if conditions not in self._made:
            self._made[conditions] = await self._new(conditions).__aenter__()
        return self._made[conditions]

    async def alone(self, request: "Wanted", *, windows: bool) -> list[Completion]:
        """What an engine answers that does nothing else."""
        key = f"{windows} {request}"
        if key not in self._alone:
            conditions = {"alone", "windows"} if windows else {"alone"}
            self._alone[key] = await ask_alone(await self.of(frozenset(conditions)), request)
        return self._alone[key]

    def _new(self, conditions: frozenset[str]) -> AsyncEngine:
        windows, is_tight = "windows" in conditions, bool(conditions & TIGHT)
        swaps = {"swap_space": 0.001} if "swapped" in conditions else {}
        mode = "auto" if {"recomputed", "swapped"} <= conditions else "swap" if swaps else "recompute"
        num_ranks = 1 if "alone" in conditions else self._num_ranks
        num_blocks = ((60 if "beams" in conditions else 36) if windows else 22) if is_tight else 400
        block_bytes = BLOCK_BYTES // (1 if self._cache_dtype == "auto" else 2)
        return AsyncEngine(
            self._models["qwen2_windows" if windows else "qwen2"],
            dtype="float32",
            max_model_len=128,
            block_size=8,
            kv_cache_memory_bytes=num_blocks * block_bytes // (1 + windows) // num_ranks,
            kv_cache_dtype=self._cache_dtype,
            enable_prefix_caching="alone" not in conditions,
            preemption_mode=mode,
            scheduling_policy="priority",
            speculative_config={"method": "ngram", "num_speculative_tokens": 4} if "drafts" in conditions else None,
            enable_lora=True,
            lora_modules=self._adapters,
            max_loras=2,
            tensor_parallel_size=num_ranks,
            **swaps,
        )

    def close(self) -> None:
        for engine in self._made.values():
            self._runner.run(engine.aclose())
        self._runner.close()
        gc.unfreeze()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines(tmp_path_factory.mktemp("combinations"))
    yield engines
    engines.close()


# ---- what comes over a request


class Watch:
    """Counts what comes over each request, by its name: being recomputed or swapped, drafts that were right."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.guesses: list[tuple[int, ...]] = []
        """Whole sequences, of which the proposer has seen the future."""
        self._names: dict[SeqId, str] = {}
        preempt, adopt, verified = Residents.preempt, Drafter.adopt, Drafter.verified

        def preempt_and_tell(residents: Residents, victims: list[Row], *terms: Any, **more: Any) -> None:
            preempt(residents, victims, *terms, **more)
            for victim in victims:
                event = "swapped" if victim.state is State.SWAPPED else "recomputed"
                self.events[victim.request_id][event] += 1

        def adopt_and_note(drafter: Drafter, sequence: Row) -> None:
            self._names[sequence.id] = sequence.request_id
            adopt(drafter, sequence)

        def verify_and_tell(drafter: Drafter, piece: SeqSlice, num_accepted: int) -> None:
            self.events[self._names[piece.seq_id]]["drafts"] += num_accepted
            self.events[self._names[piece.seq_id]]["wrong drafts"] += piece.num_samples - 1 - num_accepted
            verified(drafter, piece, num_accepted)

        monkeypatch.setattr(Residents, "preempt", preempt_and_tell)
        monkeypatch.setattr(Drafter, "adopt", adopt_and_note)
        monkeypatch.setattr(Drafter, "verified", verify_and_tell)
        monkeypatch.setattr(NgramProposer, "propose", self._propose)

    def _propose(self, _seq_id: SeqId, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """What comes, but for every seventh token."""
        position, past = len(token_ids), tuple(token_ids)
        future = next((known[position : position + most] for known in self.guesses if known[:position] == past), ())
        return tuple(token_id if place % 7 else token_id // 2 for place, token_id in enumerate(future, start=position))


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """With drafts that are always worth it where there is a proposer, and never elsewhere.

    And with turns where either way of preemption is open: once swapped, once computed again.
    """
    prefers_swap = PreemptionRule.prefers_swap

    def turn_about(rule: PreemptionRule, victims: list[Row]) -> bool:
        if rule._mode == "auto" and victims[0].request.params.beam is None:
            return victims[0].num_preemptions % 2 == 0
        return prefers_swap(rule, victims)

    monkeypatch.setattr(PreemptionRule, "prefers_swap", turn_about)
    monkeypatch.setattr(Drafter, "_price", lambda drafter, *_: 1.0 if drafter._proposer is None else 0.0)
    return Watch(monkeypatch)


# ---- asking


class Wanted(NamedTuple):
    """A request, and whether a branch of another is to make it."""

    params: SamplingParams
    lora: str | None = None
    is_forked: bool = False
    prompt: tuple[int, ...] = PROMPT


NEIGHBOURS: Final = (
    Wanted(SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True), prompt=(5, 6, 7) * 6),
    Wanted(SamplingParams(seed=3, logprobs=1, max_tokens=60, ignore_eos=True), "b", prompt=(9, 8) * 8),
    Wanted(SamplingParams(seed=4, frequency_penalty=0.5, bad_words=["the"], max_tokens=20, ignore_eos=True)),
)


def wanted(combination: Combination, stop: str | None, seed: int = 7) -> Wanted:
    """Raises `InvalidRequestError` for what is refused."""
    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    for feature in combination:
        fields |= ASKED.get(feature, {})
    if "seed" in combination:
        fields["seed"] = seed
    if stop is not None:
        fields["stop"] = stop
    return Wanted(SamplingParams(**fields), "a" if "adapter" in combination else None, "fork" in combination)


async def read(mailbox: Mailbox) -> list[Completion]:
    choices: defaultdict[int, Transcript] = defaultdict(Transcript)
    async for delta in mailbox:
        choices[delta.index].add(delta)
    scores = choices[0].prompt_scores
    return [choices[index].completion(mailbox.prompt_token_ids, scores) for index in sorted(choices)]


async def ask(engine: AsyncEngine, request: Wanted, name: str) -> list[Completion]:
    """All choices. A branch is one of the last choice of a request like it, as soon as that has begun.

    Others go first: where memory is short this is who is preempted.
    """
    params, terms = request.params, {"lora": request.lora, "cache_salt": name, "priority": 1}
    if not request.is_forked:
        async with engine.open(request.prompt, params, request_id=name, **terms) as mailbox:
            return await read(mailbox)
    begun = msgspec.structs.replace(params, stop=(), max_tokens=LATE - 2 if params.stop else NUM_TOKENS)
    async with engine.open(request.prompt, begun, request_id=f"{name}-origin", **terms) as origin:
        await anext(origin)
        async with engine.fork(origin, [params], index=params.n - 1, request_ids=[name]) as (branch,):
            return await read(branch)


async def ask_alone(engine: AsyncEngine, request: Wanted) -> list[Completion]:
    """What a branch has to say is asked of its past as a prompt, so that nothing is forked.

    That would begin a structure anew: there it is a branch of what has ended.
    """
    params, past = request.params, request.prompt[len(PROMPT) :]
    if not (request.is_forked and past and params.structured):
        async with engine.open(request.prompt, params, lora=request.lora) as mailbox:
            return await read(mailbox)
    begun = msgspec.structs.replace(params, stop=(), max_tokens=len(past))
    async with engine.open(PROMPT, begun, lora=request.lora) as origin:
        assert (await read(origin))[-1].token_ids == past
        async with engine.fork(origin, [params], index=params.n - 1) as (branch,):
            return await read(branch)


def told(completions: Sequence[Completion]) -> list[Completion]:
    """All that a caller is told, but for how much of it was cached."""
    return [replace(completion, num_cached_tokens=0) for completion in completions]


# ---- the crowd


def assert_same(answers: Sequence[Completion], expected: Sequence[Completion]) -> None:
    assert told(answers) == told(expected)


async def check(
    engines: Engines,
    watch: Watch,
    combination: Combination,
    seed: int = 7,
    compare: Callable[[Sequence[Completion], Sequence[Completion]], None] = assert_same,
) -> set[str]:
    """Run a combination in a crowd and alone, and compare; or be refused. Returns what it `missed`."""
    conditions, windows = frozenset(combination) & frozenset(CONDITIONS), "windows" in combination
    engine = await engines.of(conditions | ({"beams"} & set(combination) if windows and conditions & TIGHT else set()))
    if words := refusal(combination):
        with pytest.raises(InvalidRequestError, match=words):
            await ask(engine, wanted(combination, None, seed), "refused")
        return set()
    request = wanted(combination, None, seed)
    if "stop" in combination:
        early, whole = [await engines.alone(cut(request, length), windows=windows) for length in (LATE, NUM_TOKENS)]
        request = wanted(combination, late_character(early[0].text, whole[0].text), seed)
    name = "+".join(combination).replace(" ", "_")
    if "prefix" in combination:
        await ask(engine, request, name)
    watch.events.clear()
    watch.guesses = [
        (*answer.prompt_token_ids, *answer.token_ids) for answer in await engines.alone(request, windows=windows)
    ]
    answers, others = await in_a_crowd(engine, request, name)
    expected = await engines.alone(request._replace(prompt=answers[0].prompt_token_ids), windows=windows)
    compare(answers, expected)
    for other, neighbour in zip(others, NEIGHBOURS, strict=True):
        compare(other, await engines.alone(neighbour, windows=windows))
    return missed(combination, answers, watch.events[name])


def cut(request: Wanted, max_tokens: int) -> Wanted:
    return request._replace(params=msgspec.structs.replace(request.params, max_tokens=max_tokens))


def late_character(early: str, whole: str) -> str:
    """One that the answer has, but not in its first tokens."""
    return next(char for char in whole if char.isascii() and char.isprintable() and char not in early)


async def in_a_crowd(
    engine: AsyncEngine, request: Wanted, name: str
) -> tuple[list[Completion], list[list[Completion]]]:
    """A request's choices, and those of the neighbours, who come as soon as it runs."""
    answer = asyncio.create_task(ask(engine, request, name))
    while not (engine.statistics().num_running or answer.done()):  # noqa: ASYNC110  nobody else tells
        await asyncio.sleep(0)
    async with AsyncExitStack() as stack:
        others = [
            await stack.enter_async_context(engine.open(neighbour.prompt, neighbour.params, lora=neighbour.lora))
            for neighbour in NEIGHBOURS
        ]
        return await answer, [await read(mailbox) for mailbox in others]


def missed(combination: Combination, answers: Sequence[Completion], events: Mapping[str, int]) -> set[str]:
    """Features that did not come over the request, though nothing else that it asks for is in their way."""
    features = set(combination)
    came = {
        **{feature: events[feature] > 0 for feature in ("drafts", "recomputed", "swapped")},
        **dict.fromkeys(("prefix", "fork"), answers[0].num_cached_tokens > 0),
        "stop": answers[0].finish_reason is FinishReason.STOP,
        "windows": len(answers[0].prompt_token_ids) > WINDOW,
    }
    vain = {feature for pair in VAIN if pair <= features for feature in pair}
    assert not any(came[feature] for feature in vain & features & came.keys()), "what was in the way is not, any more"
    return {feature for feature in features & came.keys() - vain if not came[feature]}


@pytest.mark.parametrize("combination", PAIRS, ids="+".join)
def test_two_features_together_are_what_they_are_alone(
    engines: Engines, watch: Watch, combination: Combination
) -> None:
    """Catches state that one feature leaves where another reads it: a count, a mask, a guess, a block."""
    assert engines.run(check(engines, watch, combination)) == set()


def test_wrong_guesses_are_among_the_drafts(engines: Engines, watch: Watch) -> None:
    """Else nothing of the above would show what a rejected draft leaves behind."""
    assert engines.run(check(engines, watch, ("drafts", "logprobs"))) == set()
    assert watch.events["drafts+logprobs"]["wrong drafts"] > 0


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_two_features_over_a_cache_of_bfloat16(tmp_path: Path, watch: Watch) -> None:
    """Catches a number that is rounded at another time: a key is read by its own step as later ones read it."""
    engines = Engines(tmp_path, cache_dtype="bfloat16")
    try:
        num_missed = sum(bool(engines.run(check(engines, watch, pair))) for pair in PAIRS)
    finally:
        engines.close()
    assert num_missed <= len(PAIRS) // 10


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [7, 8, 9])
@pytest.mark.parametrize("first", FEATURES[:-2])
def test_three_features_together_are_what_they_are_alone(engines: Engines, watch: Watch, first: str, seed: int) -> None:
    """Where the third keeps a condition away (an answer that ends too soon to be preempted) nothing is wrong."""
    triples = [triple for triple in combinations(FEATURES, 3) if triple[0] == first]
    num_missed = sum(bool(engines.run(check(engines, watch, triple, seed))) for triple in triples)
    assert num_missed <= -(-len(triples) // 4)

"""A row with an adapter gets the tokens of the model that the adapter is merged into, whatever else is in the step."""

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from aserve import LLM, AsyncEngine, SamplingParams
from aserve.core.errors import (
    AdapterError,
    CheckpointError,
    ConfigError,
    InvalidRequestError,
    ModelNotFoundError,
    UnavailableError,
)
from tests.adapters import LINEARS, write_adapter, write_merged
from tests.checkpoints import checkpoints, write_checkpoint

__all__ = ["checkpoints"]
pytestmark = [pytest.mark.torch, pytest.mark.slow]

Prompt = list[int]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS: list[Prompt] = [[7, 8, 9], [3, 1, 4, 1, 5] * 9]
NUM_ADAPTERS = 8


def answers(model: Path, prompts: Sequence[Prompt], params: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    """Of the model as it is, each prompt alone."""
    with LLM(model, max_num_seqs=1) as llm:
        return [completion.token_ids for completion in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("linears", [LINEARS, ("q_proj", "v_proj"), ("k_proj", "up_proj"), ("down_proj",)], ids=str)
@pytest.mark.parametrize("recipe", ["llama_biases", "mistral", "qwen2_tied", "qwen3"])
def test_one_adapter_gives_the_tokens_of_the_merged_model(
    checkpoints: Callable[[str], Path], tmp_path: Path, recipe: str, linears: tuple[str, ...]
) -> None:
    """A factor in the wrong part of a fused layer, unscaled, or taken for its neighbour would change the tokens.

    And the model as it is stays as it was, before and after.
    """
    model = checkpoints(recipe)
    adapter = write_adapter(tmp_path / "a", model, rank=5, linears=linears, use_rslora=recipe == "mistral", size=0.6)
    merged, plain = answers(write_merged(tmp_path / "m", model, adapter), PROMPTS), answers(model, PROMPTS)
    assert merged != plain
    with LLM(model, enable_lora=True, lora_modules={"a": adapter}, max_loras=2) as llm:
        for lora, expected in ((None, plain), ("a", merged), (None, plain)):
            found = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora=lora)
            assert [completion.token_ids for completion in found] == expected, lora


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path], list[Path]]:
    """A model, adapters of different ranks, and what they are merged into."""
    root = tmp_path_factory.mktemp("crowd")
    model = write_checkpoint(root / "model", "qwen2")
    adapters = [
        write_adapter(root / f"a{i}", model, seed=i, rank=(4, 16, 1, 7)[i % 4], size=0.6) for i in range(NUM_ADAPTERS)
    ]
    return model, adapters, [write_merged(root / f"m{i}", model, path) for i, path in enumerate(adapters)]


def mixed_requests() -> list[tuple[int | None, Prompt, SamplingParams]]:
    """Requests of all adapters and of none, several of which begin alike; half of them greedy, the others seeded."""
    draw = random.Random(0)
    shared = [draw.randrange(256) for _ in range(40)]
    requests = []
    for number in range(32):
        prompt = shared[: draw.choice((0, 20, 40))] + [draw.randrange(256) for _ in range(draw.randrange(1, 30))]
        seeded = SamplingParams(temperature=0.9, seed=number, max_tokens=24, ignore_eos=True)
        greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        requests.append((number % (NUM_ADAPTERS + 1), prompt, seeded if number % 2 else greedy))
    return [(None if adapter == NUM_ADAPTERS else adapter, *rest) for adapter, *rest in requests]


@pytest.fixture(scope="module")
def expected(crowd: tuple[Path, list[Path], list[Path]]) -> dict[int, tuple[int, ...]]:
    """The tokens of each of the mixed requests, alone, from the merged model."""
    model, _, merged = crowd
    requests, found = mixed_requests(), {}
    for place in [None, *range(NUM_ADAPTERS)]:
        own = [number for number, (adapter, _, _) in enumerate(requests) if adapter == place]
        with LLM(model if place is None else merged[place], max_num_seqs=1) as llm:
            prompts, params = [requests[n][1] for n in own], [requests[n][2] for n in own]
            completions = llm.generate(prompts, params, use_tqdm=False)
        found.update(zip(own, (completion.token_ids for completion in completions), strict=True))
    assert len(set(found.values())) == len(requests)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"max_loras": 8},
        {"max_loras": 8, "kv_cache_memory_bytes": 45 * 16 * 128, "preemption_mode": "recompute"},
        {"max_loras": 8, "kv_cache_memory_bytes": 45 * 16 * 128, "preemption_mode": "swap", "swap_space": 0.01},
        {"max_loras": 3, "max_cpu_loras": 8},
        {"max_loras": 2, "max_cpu_loras": 3},
        {"max_loras": 8, "speculative_config": {"method": "ngram"}},
        {"max_loras": 8, "scheduling_policy": "fair", "max_num_batched_tokens": 40},
    ],
    ids=str,
)
async def test_eight_adapters_and_none_side_by_side_give_what_each_gives_alone(
    crowd: tuple[Path, list[Path], list[Path]], expected: dict[int, tuple[int, ...]], options: dict[str, object]
) -> None:
    """With preemption, prefix hits, fewer places than adapters, and drafts: another's block or factors would show."""
    model, adapters, _ = crowd
    requests = mixed_requests()
    modules = {f"a{i}": path for i, path in enumerate(adapters)}
    async with AsyncEngine(model, enable_lora=True, lora_modules=modules, max_num_seqs=16, **options) as engine:
        for _ in range(2):  # the second time prompts are found in the cache
            completions = await asyncio.gather(
                *(
                    engine.complete(prompt, params, lora=None if adapter is None else f"a{adapter}")
                    for adapter, prompt, params in requests
                )
            )
            wrong = [n for n, completion in enumerate(completions) if completion.token_ids != expected[n]]
            assert wrong == [], [(n, requests[n][0]) for n in wrong]
        statistics = engine.statistics()
    assert statistics.num_preemptions > 0 or "kv_cache_memory_bytes" not in options
    assert statistics.num_cache_hits > 0


async def test_blocks_are_shared_within_an_adapter_and_never_across(crowd: tuple[Path, list[Path], list[Path]]) -> None:
    model, adapters, _ = crowd
    prompt = [5] * 50
    modules = {"a": adapters[0], "b": adapters[1]}
    async with AsyncEngine(model, enable_lora=True, lora_modules=modules) as engine:
        cached = [
            (await engine.complete(prompt, GREEDY, lora=lora)).num_cached_tokens
            for lora in ("a", "b", None, "a", "b", None)
        ]
    assert cached == [0, 0, 0, 48, 48, 48]


async def test_branches_of_a_generation_have_its_adapter(crowd: tuple[Path, list[Path], list[Path]]) -> None:
    """Also when the generation has been left, and its adapter removed: whoever uses it keeps it."""
    model, adapters, merged = crowd
    expected = answers(merged[0], [[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))[0]
    async with AsyncEngine(model, enable_lora=True, lora_modules={"a": adapters[0]}, max_cpu_loras=8) as engine:
        short = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        async with engine.open([1, 2, 3], short, lora="a") as mailbox:
            [_ async for _ in mailbox]
            engine.adapters.remove("a")
            long = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
            async with engine.fork(mailbox, [long]) as (branch,):
                tokens = [token for delta in [d async for d in branch] for token in delta.token_ids]
        assert tuple(tokens) == expected[4:]
        with pytest.raises(ModelNotFoundError, match="no adapter 'a'"):
            await engine.complete([1], GREEDY, lora="a")


async def test_adapters_come_and_go_while_the_engine_runs(
    crowd: tuple[Path, list[Path], list[Path]], tmp_path: Path
) -> None:
    """Under a name that was given to another before, too: what that left in the cache is found by nobody."""
    model, adapters, merged = crowd
    prompt = [6] * 40
    one, two = (answers(path, [prompt])[0] for path in merged[:2])
    async with AsyncEngine(model, enable_lora=True, lora_root=adapters[0].parent, max_loras=1) as engine:
        for folder, expected in ((adapters[0], one), (adapters[1], two), (adapters[0], one)):
            await engine.adapters.add("a", folder.name)
            assert (await engine.complete(prompt, GREEDY, lora="a")).token_ids == expected
            with pytest.raises(AdapterError, match="name of an adapter already"):
                await engine.adapters.add("a", adapters[1].name)
            engine.adapters.remove("a")
        await engine.adapters.add("a", str(adapters[0]))
        await engine.adapters.add("b", str(adapters[1]))  # there is place for one
        assert (await engine.complete(prompt, GREEDY, lora="a")).token_ids == one
        assert (await engine.complete(prompt, GREEDY, lora="b")).token_ids == two


async def test_an_engine_that_closes_leaves_nobody_waiting(crowd: tuple[Path, list[Path], list[Path]]) -> None:
    """Neither who is answered by an adapter, nor who waits for another to be loaded."""
    model, adapters, _ = crowd
    modules = {"a": adapters[0], "b": adapters[1]}
    engine = AsyncEngine(model, enable_lora=True, lora_modules=modules, max_loras=1)
    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    async with engine:
        tasks = [asyncio.create_task(engine.complete([1, 2], long, lora=lora)) for lora in ("a", "b", "a")]
        for _ in range(1000):
            await asyncio.sleep(0.01)
            if engine.statistics().num_running:
                break
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    assert [type(outcome) for outcome in outcomes] == [UnavailableError] * 3


async def test_an_adapter_that_is_refused_hurts_nobody(crowd: tuple[Path, list[Path], list[Path]]) -> None:
    model, adapters, merged = crowd
    expected = answers(merged[0], [[1, 2, 3]])[0]
    async with AsyncEngine(
        model, enable_lora=True, lora_modules={"a": adapters[0]}, lora_root=model.parent, max_lora_rank=16
    ) as engine:
        write_adapter(model.parent / "too_large", model, rank=17)
        answer = asyncio.create_task(engine.complete([1, 2, 3], GREEDY, lora="a"))
        with pytest.raises(AdapterError, match=r"r must be an integer in \[1, 16\] \(max_lora_rank\), got 17"):
            await engine.adapters.add("b", "too_large")
        assert (await answer).token_ids == expected
        with pytest.raises(ModelNotFoundError):
            await engine.complete([1], GREEDY, lora="b")
        with pytest.raises(InvalidRequestError, match="lora must be a string"):
            await engine.complete([1], GREEDY, lora=7)  # type: ignore[arg-type]


def test_options_that_go_ill_together_are_refused(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    model = checkpoints("llama")
    adapter = write_adapter(tmp_path / "a", model)
    for message, options in (
        ("lora_modules needs enable_lora", {"lora_modules": {"a": adapter}}),
        (r"max_cpu_loras must be at least max_loras \(3\), got 2", {"max_loras": 3, "max_cpu_loras": 2}),
        ("max_lora_rank must be at most 256, got 257", {"max_lora_rank": 257}),
        ("lora_modules must be a mapping .* the name 'a' twice", {"lora_modules": ["a=x", "a=y"]}),
        ("lora_modules must be a mapping .* a name has", {"lora_modules": ["=x"]}),
        ("'a' without a folder", {"lora_modules": ["a"]}),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(model, **options)
    with pytest.raises(AdapterError, match="name of the model already"):
        LLM(model, enable_lora=True, lora_modules={"llama": adapter})
    with pytest.raises(AdapterError, match="no such folder"):
        LLM(model, enable_lora=True, lora_modules={"a": tmp_path / "nowhere"})
    with pytest.raises(CheckpointError, match="takes no adapters"):
        LLM(checkpoints("gpt2"), enable_lora=True)

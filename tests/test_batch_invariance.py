"""On a CPU, every row's bits are the same whatever else is in the step, however its prompt was cut, on any threads.

Whatever preempts, swaps, hits a cache or decodes makes another mixture of the same slices, so slices are what varies.
Of each position the hidden state is compared, of the last of each slice the logits, with those of the sequence alone.
The full grid, on the models of scripts/make_models.py where they are there, and on the demonstration model:

    python -m pytest -m thorough tests/test_batch_invariance.py
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from aserve.core.quantization import QUANTIZATIONS
from aserve.kernels.cpu import CpuOps
from aserve.kernels.dispatch import select_ops
from aserve.models.checkpoint import resolve_checkpoint
from aserve.models.interface import CausalLM
from aserve.models.loader import load_model
from aserve.models.lora import LoraLayers
from aserve.models.peft import inspect_adapter
from tests.adapters import write_adapter
from tests.checkpoints import checkpoints, write_checkpoint
from tests.kernels.cases import Fast, native_ops, paged
from tests.models.paged import PagedSequences

__all__ = ["checkpoints"]
pytestmark = [pytest.mark.torch, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
MAX_CHUNK = 512
HEADS = ((4, 2, 8), (4, 1, 32), (7, 1, 64), (14, 2, 64), (2, 2, 128), (3, 3, 64), (1, 1, 128), (2, 1, 256))
"""Query heads, key heads, dimensions."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENS = st.one_of(st.integers(1, 64), st.integers(1, 700), st.integers(1, 2048))
SHAPES = {
    "llama": {"hidden_size": 64, "intermediate_size": 176, "max_position_embeddings": 2048},
    "qwen2": {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1, "intermediate_size": 1104},
    "mistral": {"sliding_window": 300, "max_position_embeddings": 1024},
}
"""What is changed of the recipes: a head group of 7, a product of more than 1024 inputs, windows in a second tile."""


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


# ---- attention


@pytest.mark.parametrize("ops", [CpuOps(), select_ops(torch.device("cpu"))], ids=lambda ops: type(ops).__name__)
@settings(max_examples=30)
@given(
    heads=st.sampled_from(HEADS),
    dtype=st.sampled_from(DTYPES),
    window=st.sampled_from((None, None, 24, 600)),
    lens=st.lists(LENS, min_size=1, max_size=6),
    chunk=st.integers(1, MAX_CHUNK),
    num_threads=st.sampled_from((1, 1, 2, 3)),
    block_size=st.sampled_from((8, 16, 256)),
)
@example((14, 2, 64), torch.bfloat16, None, [137, 144], 1, 1, 16)
@example((4, 2, 8), torch.float32, None, [300, 700], 1, 1, 8)
@example((2, 2, 128), torch.float32, None, [390, 1], 33, 2, 8)
def test_attention_gives_a_query_the_same_bits_in_any_step(
    ops, heads, dtype, window, lens, chunk, num_threads, block_size
):
    torch.manual_seed(0)
    fast = Fast(ops, torch.device("cpu"), dtype)
    query_lens = sorted(1 if s % 2 else min(chunk, length) for s, length in enumerate(lens))
    lens = [max(pair) for pair in zip(sorted(lens), query_lens, strict=True)]
    case = paged(fast, lens, query_lens, heads=heads[:2], head_dim=heads[2], block_size=block_size)
    options = {} if window is None else {"sliding_window": window}
    torch.set_num_threads(num_threads)
    together = case.attend(fast.ops, **options)
    torch.set_num_threads(1)
    starts = case.batch.query_starts_S1.tolist()
    for s, (length, num_queries) in enumerate(zip(lens, query_lens, strict=True)):
        for query in {0, num_queries // 2, num_queries - 1}:
            alone = case.only(s, starts[s] + query, length - num_queries + query + 1).attend(fast.ops, **options)
            assert torch.equal(alone[0], together[starts[s] + query]), f"sequence {s}, query {query}"


# ---- models


class Solo:
    """What each sequence yields alone: hidden states of all positions, from chunks of `MAX_CHUNK`, on one thread.

    slots: of their adapters.
    """

    def __init__(
        self,
        model: CausalLM,
        dtype: torch.dtype,
        prompts: Sequence[Sequence[int]],
        slots: Sequence[int] | None,
        num_slots: int,
    ) -> None:
        torch.set_num_threads(1)
        self._model = model
        self.hidden = []
        for s, prompt in enumerate(prompts):
            own = None if slots is None else [slots[s]]
            cache = PagedSequences(model, max_len=len(prompt), dtype=dtype, slots=own, num_slots=num_slots)
            chunks = [prompt[i : i + MAX_CHUNK] for i in range(0, len(prompt), MAX_CHUNK)]
            self.hidden.append(torch.cat([cache.hidden([(0, chunk)])[0] for chunk in chunks]))

    def logits(self, sequence: int, position: int) -> Tensor:
        """[V], of one row alone."""
        torch.set_num_threads(1)
        with torch.inference_mode():
            return self._model.logits(self.hidden[sequence][position : position + 1])[0]


def check_crowd(
    model: CausalLM,
    dtype: torch.dtype,
    prompts: Sequence[Sequence[int]],
    chunks: Sequence[int],
    threads: Sequence[int] = (1,),
    slots: Sequence[int] | None = None,
    num_slots: int = 0,
) -> int:
    """Compute all prompts together, in slices whose sizes go through `chunks`; returns how many positions agree."""
    solo = Solo(model, dtype, prompts, slots, num_slots)
    cache = PagedSequences(model, len(prompts), max(map(len, prompts)), dtype, slots, num_slots)
    done = [0] * len(prompts)
    step = 0
    while any(num_done < len(prompt) for num_done, prompt in zip(done, prompts, strict=True)):
        sizes = [chunks[(step + 3 * s) % len(chunks)] for s in range(len(prompts))]
        slices = [
            (s, prompts[s][done[s] : done[s] + size]) for s, size in enumerate(sizes) if done[s] < len(prompts[s])
        ]
        torch.set_num_threads(threads[step % len(threads)])
        hidden = cache.hidden(slices)
        last = torch.stack([part[-1] for part in hidden.values()])
        with torch.inference_mode():
            logits = model.logits(last)
        for row, (s, part) in enumerate(hidden.items()):
            where = f"step {step}, sequence {s}, positions {done[s]} to {done[s] + len(part) - 1}"
            assert torch.equal(part, solo.hidden[s][done[s] : done[s] + len(part)]), where
            done[s] += len(part)
            assert torch.equal(logits[row], solo.logits(s, done[s] - 1)), where
        step += 1
    return sum(done)


def random_prompts(model: CausalLM, lens: Sequence[int]) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(model.spec.vocab_size) for _ in range(length)] for length in lens]


def load(folder: Path, dtype: str, ops: CpuOps, quantization: str | None = None) -> CausalLM:
    checkpoint = resolve_checkpoint(str(folder), None, None, trust_remote_code=False)
    return load_model(checkpoint, device="cpu", ops=ops, dtype=dtype, max_model_len=2048, quantization=quantization)


@pytest.fixture(
    scope="module",
    params=[
        (recipe, dtype, kernels)
        for recipe in SHAPES
        for dtype in ("float32", "bfloat16")
        for kernels in ("own", "torch's")
    ],
    ids=str,
)
def model(request, tmp_path_factory) -> tuple[CausalLM, torch.dtype]:
    recipe, dtype, kernels = request.param
    folder = write_checkpoint(tmp_path_factory.mktemp(recipe) / recipe, recipe, **SHAPES[recipe])
    ops = select_ops(torch.device("cpu")) if kernels == "own" else CpuOps()
    return load(folder, dtype, ops), getattr(torch, dtype)


@settings(max_examples=4)
@given(
    lens=st.lists(st.integers(1, 450), min_size=1, max_size=9),
    chunks=st.lists(st.integers(1, MAX_CHUNK), min_size=1, max_size=5),
    threads=st.sampled_from(([1], [1], [1, 2])),
)
@example([137, 144, 500], [512, 1, 130], [1])
def test_a_row_of_logits_has_the_same_bits_in_any_crowd(model, lens, chunks, threads):
    lens = [min(length, model[0].spec.context_len) for length in lens]
    assert check_crowd(*model, random_prompts(model[0], lens), chunks, threads) == sum(lens)


@pytest.mark.parametrize("ops", [CpuOps(), select_ops(torch.device("cpu"))], ids=lambda ops: type(ops).__name__)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_so_it_has_with_adapters_side_by_side(tmp_path, ops, dtype):
    """Rows of three adapters and of none, that come and go: who shares an adapter, or a tile, changes no bit."""
    folder = write_checkpoint(tmp_path / "qwen2", "qwen2", **SHAPES["qwen2"])
    torch_dtype = getattr(torch, dtype)
    lora = LoraLayers(3, 16, ops, torch_dtype, torch.device("cpu"))
    model = load_model(resolve_checkpoint(str(folder)), device="cpu", ops=ops, dtype=dtype, lora=lora)
    for slot, rank in enumerate((16, 3, 8)):
        path = write_adapter(tmp_path / str(slot), folder, seed=slot, rank=rank)
        lora.put(slot, lora.read(inspect_adapter(path, lora.modules, 16)))
    lens, slots = [137, 20, 60, 1, 90, 33, 40], [0, 1, -1, 2, 0, 1, 0]
    prompts = random_prompts(model, lens)
    assert check_crowd(model, torch_dtype, prompts, [64, 1, 7, 1, 1], [1, 2], slots, 3) == sum(lens)
    plain, adapted = (Solo(model, torch_dtype, prompts[:1], own, 3).hidden[0] for own in ([-1], [0]))
    assert not torch.equal(plain, adapted)


@pytest.mark.parametrize("quantization", [name for name in QUANTIZATIONS if name.startswith("int8")])
def test_so_it_has_with_weights_of_int8(tmp_path, quantization):
    """Rows that are quantized by a scale of several, or by another's."""
    dtype = "float32" if quantization == "int8-g128" else "bfloat16"
    ops = native_ops()
    model = load(write_checkpoint(tmp_path / "qwen2", "qwen2", **SHAPES["qwen2"]), dtype, ops, quantization)
    lens = [137, 20, 60, 1, 90, 33, 40]
    prompts = random_prompts(model, lens)
    assert check_crowd(model, getattr(torch, dtype), prompts, [64, 1, 7, 1, 1], [1, 2]) == sum(lens)


GRID_CHUNKS = ([1], [512], [16], [1, 7, 128, 33], [300, 1, 1, 1, 64])
GRID_ROWS = (1, 2, 3, 5, 8, 16, 17, 31, 32, 33, 48, 63, 64)


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["models/q05", "models/tiny", "aserve/demo"])
def test_the_grid(name, dtype):
    if not (ROOT / name).is_dir():
        pytest.skip(f"python scripts/make_models.py models makes {name}")
    model = load(ROOT / name, dtype, select_ops(torch.device("cpu")))
    budget = 512 if name.endswith("q05") else 4096
    rng = random.Random(0)
    num_positions = 0
    for place, num_rows in enumerate(GRID_ROWS):
        longest = 2048 if place % 4 == 0 else budget
        lens = [longest, *(rng.randint(1, max(2, 2 * budget // num_rows)) for _ in range(num_rows - 1))]
        chunks = GRID_CHUNKS[place % len(GRID_CHUNKS)] if num_rows > 1 else [1, 512, 1, 300]
        lens = [min(length, 2048) for length in lens]
        num_positions += check_crowd(model, getattr(torch, dtype), random_prompts(model, lens), chunks, (1, 2))
    print(f"{name} in {dtype}: {num_positions} positions have the same bits")

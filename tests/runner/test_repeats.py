"""Steps that are repeated: the same bits as the eager way, and nothing is captured but kernels."""

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import aserve.runner.repeats as module
from aserve.kernels.cpu import CpuOps
from aserve.kernels.native.captured_calls import CapturedCalls, UnrepeatableError
from aserve.kernels.native.native_ops import NativeOps
from aserve.kernels.ops import AttentionBatch, KVLayer
from aserve.models.checkpoint import resolve_checkpoint
from aserve.models.interface import CausalLM, ForwardBatch
from aserve.models.loader import load_model
from aserve.models.lora import LoraLayers
from aserve.runner.repeats import CAPTURE_AT, LATEST, MAX_TOKENS, Repeats, repeats
from tests.checkpoints import VOCAB_SIZE, checkpoints
from tests.kernels.cases import native_ops
from tests.models.paged import PagedSequences

__all__ = ["checkpoints"]
pytestmark = pytest.mark.torch


@pytest.fixture
def ops() -> NativeOps:
    return native_ops()


class Repeating:
    """A `CausalLM` whose steps are repeated where they can be. repeated: of each step, whether it was."""

    def __init__(self, model: CausalLM, ops: NativeOps) -> None:
        self.model, self.spec, self.ops = model, model.spec, ops
        self.repeats: Repeats | None = None
        self.repeated: list[bool] = []

    def forward(self, token_ids_T: Tensor, kv: Sequence[KVLayer], batch: ForwardBatch) -> Tensor:
        self.repeats = self.repeats or Repeats(self.model, self.ops, kv)
        hidden_TE = self.repeats.forward(token_ids_T, batch)
        self.repeated.append(hidden_TE is not None)
        return self.model.forward(token_ids_T, kv, batch) if hidden_TE is None else hidden_TE.clone()

    def logits(self, hidden_SE: Tensor) -> Tensor:
        return self.model.logits(hidden_SE)


def load(folder: Path, ops: NativeOps, **how: object) -> CausalLM:
    return load_model(resolve_checkpoint(str(folder)), device="cpu", ops=ops, max_model_len=320, **how)


PROMPTS = (40, 3, 90, 17)
"""Lengths."""


def run(
    model: CausalLM, dtype: torch.dtype, counts: Sequence[int], drafted: Sequence[Sequence[int]] = ()
) -> list[Tensor]:
    """Hidden states of prompts of several lengths, of steps in which so many of the sequences decode, and then of steps
    in which sequences have so many tokens each."""
    rng = torch.Generator().manual_seed(0)
    sequences = PagedSequences(model, num_sequences=4, dtype=dtype)
    prompts = [torch.randint(3, VOCAB_SIZE, (length,), generator=rng).tolist() for length in PROMPTS]
    steps = [[piece] for piece in enumerate(prompts)]
    for turn, count in enumerate(counts):
        steps.append([((s + turn) % 4, [(7 * turn + s) % VOCAB_SIZE]) for s in range(count)])
    for turn, sizes in enumerate(drafted):
        ids = (range(7 * turn + s, 7 * turn + s + size) for s, size in enumerate(sizes))
        steps.append([((s + turn) % 4, [token % VOCAB_SIZE for token in tokens]) for s, tokens in enumerate(ids)])
    return [hidden for step in steps for hidden in sequences.hidden(step).values()]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    ("recipe", "how"),
    [
        ("llama_biases", {"dtype": "float32"}),
        ("llama_biases", {"dtype": "bfloat16", "quantization": "int8"}),
        ("qwen2", {"dtype": "bfloat16"}),
        ("qwen3", {"dtype": "bfloat16"}),
        ("mistral", {"dtype": "float32"}),
    ],
)
def test_a_step_that_is_repeated_has_the_bits_of_one_that_is_not(checkpoints, ops, recipe, how, num_threads):
    """Catches memory that is read from where it was when it was captured, and contexts, windows and norms of then."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        model = load(checkpoints(recipe), ops, **how)
        repeating = Repeating(model, ops)
        counts = [1] * 6 + [3] * 5 + [1, 3, 1, 4, 4, 4, 4, 2] + [1, 3] * 20
        drafted = [(9,), (1, 8), (3, 3, 3), (9,), (4,), (2, 5, 1), (1, 3), (8, 1)]
        dtype = getattr(torch, how["dtype"])
        both = (run(each, dtype, counts, drafted) for each in (model, repeating))
        for one, other in zip(*both, strict=True):
            assert torch.equal(one, other)
    finally:
        torch.set_num_threads(before)
    assert repeating.repeated == expected([*PROMPTS, *counts, *map(sum, drafted)])
    assert repeating.repeated.count(True) > 40


def expected(counts: Sequence[int]) -> list[bool]:
    """Of each step, by its tokens, whether it is repeated, or captured to be."""
    known: set[int] = set()
    found, eager = [], []
    for count in counts:
        if count not in known and count <= MAX_TOKENS:
            eager.append(count)
            if eager[-LATEST:].count(count) >= CAPTURE_AT:
                known.add(count)
        found.append(count in known)
    return found


def test_a_number_of_tokens_that_seldom_comes_up_is_not_captured(checkpoints, ops):
    repeating = Repeating(load(checkpoints("qwen2"), ops), ops)
    sequences = PagedSequences(repeating)
    sizes = [5, 1, 2, 3, 4] * CAPTURE_AT
    assert 1 < sizes[:LATEST].count(5) < CAPTURE_AT
    for size in sizes:
        sequences.hidden([(0, [1] * size)])
    assert not any(repeating.repeated)


def test_a_step_of_which_few_tokens_are_wanted_goes_the_eager_way(checkpoints, ops):
    repeating = Repeating(load(checkpoints("qwen2"), ops), ops)
    sequences = PagedSequences(repeating)
    for _ in range(CAPTURE_AT + 1):
        sequences.hidden([(0, [1])], wanted=[0])
    assert not any(repeating.repeated)


def test_rows_with_adapters_go_the_eager_way(checkpoints, ops):
    lora = LoraLayers(1, 4, ops, torch.float32, torch.device("cpu"))
    repeating = Repeating(load(checkpoints("qwen2"), ops, lora=lora), ops)
    sequences = PagedSequences(repeating, slots=[-1], num_slots=1)
    for _ in range(CAPTURE_AT + 1):
        sequences.hidden([(0, [1])])
    assert not any(repeating.repeated)


def test_captures_have_so_much_memory_together_and_the_oldest_goes(checkpoints, ops, monkeypatch):
    model = load(checkpoints("qwen2"), ops)
    repeating = Repeating(model, ops)
    sequences = PagedSequences(repeating, num_sequences=4)

    def decode(count: int) -> list[int]:
        for _ in range(CAPTURE_AT):
            sequences.hidden([(s, [1]) for s in range(count)])
        return list(repeating.repeats._captured._captured)

    decode(1)
    row = repeating.repeats._captured.get(1).calls.num_bytes
    monkeypatch.setattr(module, "MAX_BYTES", 3 * row)
    assert decode(2) == [1, 2]
    decode(1)
    assert decode(3) == [3]
    assert decode(4) == []
    assert decode(1) == [1]
    assert decode(2) == [1, 2]
    assert repeating.repeats._captured._max_tokens == 3


def test_a_step_of_very_many_rows_is_not_repeated(checkpoints, ops):
    repeating = Repeating(load(checkpoints("qwen2"), ops), ops)
    sequences = PagedSequences(repeating, num_sequences=MAX_TOKENS + 1, max_len=8)
    for count in (MAX_TOKENS, MAX_TOKENS + 1):
        for _ in range(CAPTURE_AT):
            sequences.hidden([(s, [1]) for s in range(count)])
    assert repeating.repeated == [*[False] * (CAPTURE_AT - 1), True, *[False] * CAPTURE_AT]


class Scaling:
    """A model with an operation of torch between its kernels."""

    def __init__(self, model: CausalLM) -> None:
        self.model, self.spec = model, model.spec

    def forward(self, token_ids_T: Tensor, kv: Sequence[KVLayer], batch: ForwardBatch) -> Tensor:
        return 2 * self.model.forward(token_ids_T, kv, batch)


def test_a_model_that_does_anything_else_is_never_repeated(checkpoints, ops):
    """Catches calls among which something is missing."""
    scaling = Scaling(load(checkpoints("qwen2"), ops))
    repeating = Repeating(scaling, ops)
    for one, other in zip(*(run(model, torch.float32, [1] * 6) for model in (scaling, repeating)), strict=True):
        assert torch.equal(one, other)
    assert not any(repeating.repeated)
    assert repeating.repeats._captured._max_tokens == 0


def test_only_a_model_on_our_own_kernels_is_repeated(checkpoints, ops):
    class Watched(NativeOps):
        """Whose methods somebody wants to see called."""

    model = load(checkpoints("qwen2"), ops)
    assert isinstance(repeats(model, ops, []), Repeats)
    assert repeats(model, CpuOps(), []) is None
    assert repeats(model, Watched(ops.library), []) is None


# ---- captured calls


NOTHING = torch.zeros(0)
NOBODY = AttentionBatch(0, NOTHING, NOTHING, NOTHING, NOTHING, 0, 0)


def norms(ops: NativeOps, x_TE: Tensor) -> Callable[[], Tensor]:
    weight_E = torch.ones(8)
    return lambda: ops.rms_norm(ops.rms_norm(x_TE, weight_E, 1e-6), weight_E, 1e-6)


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda x: x + 1, "aten.add"),
        (lambda x: x.expand(3, 8).clone(), "aten.clone"),
        (lambda x: x.expand(3, 8).t().reshape(-1), "aten.reshape"),
        (lambda x: x.mul_(2.0), "aten.mul_"),
    ],
)
def test_what_no_kernel_does_is_told(ops, spoil, what):
    work = norms(ops, torch.randn(1, 8))
    with torch.inference_mode(), pytest.raises(UnrepeatableError, match=what):
        CapturedCalls(ops, NOBODY, lambda: spoil(work()))


def test_a_kernel_that_is_not_known_to_do_the_same_again_is_told(ops):
    logits_SV, targets_S = torch.zeros(1, 8), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(UnrepeatableError, match="score_f32"):
        CapturedCalls(ops, NOBODY, lambda: ops.score(logits_SV, targets_S, 0).logprobs_S)


def test_what_others_call_meanwhile_is_not_captured_and_nothing_is_noted_behind_it(ops):
    x_TE, other_TE = torch.randn(1, 8), torch.randn(1, 8)
    work = norms(ops, x_TE)

    def beside() -> Tensor:
        thread = threading.Thread(target=norms(ops, other_TE))
        thread.start()
        thread.join()
        return work()

    with ops.library.observed() as seen:
        beside()
    assert [kernel.name for kernel, _ in seen] == ["rms_norm_f32"] * 2
    work()
    assert len(seen) == 2
    with pytest.raises(KeyError), ops.library.observed() as seen:
        raise KeyError
    work()
    assert seen == []


def test_others_compute_while_something_is_captured(ops):
    """Catches what is changed of functions that another thread is in."""
    x_TE, is_over = torch.randn(64, 512), threading.Event()
    weight_E = torch.ones(512)
    expected_TE = ops.rms_norm(x_TE, weight_E, 1e-6)
    wrong: list[Tensor] = []

    def compute() -> None:
        while not is_over.is_set():
            if not torch.equal(found_TE := ops.rms_norm(x_TE, weight_E, 1e-6), expected_TE):
                wrong.append(found_TE)

    others = [threading.Thread(target=compute) for _ in range(2)]
    for thread in others:
        thread.start()
    for _ in range(2000):
        with ops.library.observed() as seen:
            ops.rms_norm(x_TE[:1], weight_E, 1e-6)
        assert len(seen) == 1
    is_over.set()
    for thread in others:
        thread.join()
    assert not wrong


def test_a_capture_imports_nothing():
    """Catches a step of a second, in which torch imports its compiler."""
    code = """
import sys, torch
from aserve.kernels.native.captured_calls import CapturedCalls
from tests.kernels.cases import native_ops
from tests.runner.test_repeats import NOBODY, norms
ops = native_ops()
work = norms(ops, torch.randn(1, 8))
work()
before = set(sys.modules)
CapturedCalls(ops, NOBODY, work)
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"

"""A model's steps by captured calls: the same bits as the eager way, and nothing is captured but kernels."""

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import aserve.runner.step_calls as module
from aserve.kernels.cpu import CpuOps
from aserve.kernels.native.call_memory import UnrepeatableError
from aserve.kernels.native.captured_calls import CAPTURED, CapturedCalls, Sizes
from aserve.kernels.native.native_ops import NativeOps
from aserve.kernels.ops import AttentionBatch, KVLayer
from aserve.models.checkpoint import resolve_checkpoint
from aserve.models.interface import CausalLM, ForwardBatch
from aserve.models.loader import load_model
from aserve.models.lora import LoraLayers
from aserve.runner.step_calls import StepCalls, step_calls
from tests.checkpoints import VOCAB_SIZE, checkpoints
from tests.kernels.cases import native_ops
from tests.models.paged import PagedSequences

__all__ = ["checkpoints"]
pytestmark = pytest.mark.torch


@pytest.fixture
def ops() -> NativeOps:
    return native_ops()


class Repeating:
    """A `CausalLM` whose steps are made by calls where they can be. repeated: of each step, whether it was."""

    def __init__(self, model: CausalLM, ops: NativeOps) -> None:
        self.model, self.spec, self.ops = model, model.spec, ops
        self.calls: StepCalls | None = None
        self.repeated: list[bool] = []

    def forward(self, token_ids_T: Tensor, kv: Sequence[KVLayer], batch: ForwardBatch) -> Tensor:
        self.calls = self.calls or StepCalls(self.model, self.ops, kv)
        hidden_NE = self.calls.forward(token_ids_T, batch)
        self.repeated.append(hidden_NE is not None)
        return self.model.forward(token_ids_T, kv, batch) if hidden_NE is None else hidden_NE.clone()

    def logits(self, hidden_SE: Tensor) -> Tensor:
        return self.model.logits(hidden_SE)


def load(folder: Path, ops: NativeOps, **how: object) -> CausalLM:
    return load_model(resolve_checkpoint(str(folder)), device="cpu", ops=ops, max_model_len=320, **how)


STEPS = (
    [(0, 40)],
    [(1, 3)],
    [(2, 90)],
    [(3, 17)],
    [(0, 1)],
    [(0, 1), (1, 1), (2, 1)],
    [(0, 1), (1, 1), (2, 33), (3, 2)],
    [(0, 1), (1, 9)],
    [(3, 64), (2, 65)],
    [(1, 1)],
    [(0, 1), (1, 1), (2, 1), (3, 1)],
    [(2, 3), (3, 3), (0, 3)],
)
"""Of each step its sequences, and how many tokens they get."""


def run(model: CausalLM, dtype: torch.dtype, *, wants_last: bool = False) -> list[Tensor]:
    """Hidden states of all tokens of these steps, or of each sequence's last."""
    sequences = PagedSequences(model, num_sequences=4, dtype=dtype)
    found = []
    for turn, step in enumerate(STEPS):
        slices = [(s, [(7 * turn + s + k) % VOCAB_SIZE for k in range(size)]) for s, size in step]
        found.append(sequences.forward(slices, wants_last=wants_last))
    return found


@pytest.mark.parametrize("wants_last", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    ("recipe", "how"),
    [
        ("llama_biases", {"dtype": "float32"}),
        ("llama_biases", {"dtype": "bfloat16", "quantization": "int8"}),
        ("qwen2", {"dtype": "bfloat16"}),
        ("qwen2_windows", {"dtype": "float32"}),
        ("qwen3", {"dtype": "bfloat16"}),
        ("mistral", {"dtype": "float32"}),
        ("qwen3", {"dtype": "float32", "cache": "bfloat16"}),
    ],
)
def test_a_step_by_calls_has_the_bits_of_one_kernel_by_kernel(checkpoints, ops, recipe, how, num_threads, wants_last):
    """Catches memory that something lies in still, sizes of another step, contexts, windows and norms of then."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        model = load(checkpoints(recipe), ops, **{name: value for name, value in how.items() if name != "cache"})
        repeating = Repeating(model, ops)
        dtype = getattr(torch, how.get("cache", how["dtype"]))
        both = (run(each, dtype, wants_last=wants_last) for each in (model, repeating))
        for one, other in zip(*both, strict=True):
            assert torch.equal(one, other)
    finally:
        torch.set_num_threads(before)
    assert all(repeating.repeated)
    assert len(repeating.repeated) == len(STEPS)


def test_what_is_computed_where_nothing_is_wanted_is_there_for_the_next_step(checkpoints, ops):
    """A chunk of a prompt that samples nothing."""
    model = load(checkpoints("qwen2"), ops)
    found = []
    for each in (model, Repeating(model, ops)):
        sequences = PagedSequences(each)
        assert sequences.forward([(0, [1, 2, 3, 4])], wanted=[]).shape == (0, model.spec.hidden_size)
        found.append(sequences.forward([(0, [5])]))
    assert torch.equal(*found)


def test_rows_with_adapters_go_the_eager_way(checkpoints, ops):
    lora = LoraLayers(1, 4, ops, torch.float32, torch.device("cpu"))
    repeating = Repeating(load(checkpoints("qwen2"), ops, lora=lora), ops)
    sequences = PagedSequences(repeating, slots=[-1], num_slots=1)
    sequences.forward([(0, [1])])
    assert not any(repeating.repeated)


def test_a_step_that_is_too_large_goes_the_eager_way(checkpoints, ops, monkeypatch):
    repeating = Repeating(load(checkpoints("qwen2"), ops), ops)
    sequences = PagedSequences(repeating)
    sequences.forward([(0, [1] * 8)])
    row_bytes = repeating.calls._calls.num_bytes(Sizes(1, 1, 0))
    monkeypatch.setattr(module, "MAX_BYTES", 8 * row_bytes)
    for size in (8, 9):
        sequences.forward([(0, [1] * size)])
    monkeypatch.undo()
    monkeypatch.setattr(module, "MAX_TOKENS", 8)
    for size in (8, 9):
        sequences.forward([(0, [1] * size)])
    assert repeating.repeated == [True, True, False, True, False]


def test_the_eager_way_begins_too(checkpoints, ops, monkeypatch):
    begun: list[bool] = []
    model = load(checkpoints("qwen2"), ops)
    repeating = Repeating(model, ops)
    sequences = PagedSequences(repeating)
    repeating.calls = StepCalls(model, ops, sequences.kv, lambda: begun.append(True))
    sequences.forward([(0, [1])])
    monkeypatch.setattr(module, "MAX_TOKENS", 0)
    sequences.forward([(0, [1])])
    assert repeating.repeated == [True, False]
    assert len(begun) == 2


class Scaling:
    """A model with an operation of torch between its kernels."""

    def __init__(self, model: CausalLM) -> None:
        self.model, self.spec = model, model.spec

    def forward(self, token_ids_T: Tensor, kv: Sequence[KVLayer], batch: ForwardBatch) -> Tensor:
        return 2 * self.model.forward(token_ids_T, kv, batch)

    def logits(self, hidden_SE: Tensor) -> Tensor:
        return self.model.logits(hidden_SE)


def test_a_model_that_does_anything_else_is_never_repeated(checkpoints, ops):
    """Catches calls among which something is missing."""
    scaling = Scaling(load(checkpoints("qwen2"), ops))
    repeating = Repeating(scaling, ops)
    for one, other in zip(*(run(model, torch.float32) for model in (scaling, repeating)), strict=True):
        assert torch.equal(one, other)
    assert not any(repeating.repeated)


def test_only_a_model_on_our_own_kernels_is_repeated(checkpoints, ops):
    class Watched(NativeOps):
        """Whose methods somebody wants to see called."""

    model = load(checkpoints("qwen2"), ops)
    assert isinstance(step_calls(model, ops, []), StepCalls)
    assert step_calls(model, CpuOps(), []) is None
    assert step_calls(model, Watched(ops.library), []) is None


# ---- captured calls


NOTHING = torch.zeros(0)
NOBODY = AttentionBatch(0, NOTHING, NOTHING, NOTHING, NOTHING, 0, 0)


def norms(ops: NativeOps, x_TE: Tensor) -> Callable[[], Tensor]:
    weight_E = torch.ones(8)
    return lambda: ops.rms_norm(ops.rms_norm(x_TE, weight_E, 1e-6), weight_E, 1e-6)


def captured(ops: NativeOps, forward: Callable[[], Tensor]) -> CapturedCalls:
    return CapturedCalls(ops, NOBODY, forward, lambda x: x)


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda x: x + 1, "aten.add"),
        (lambda x: x[:1].expand(3, 8).clone(), "aten.clone"),
        (lambda x: x[:1].expand(3, 8).t().reshape(-1), "aten.reshape"),
        (lambda x: x.mul_(2.0), "aten.mul_"),
    ],
)
def test_what_no_kernel_does_is_told(ops, spoil, what):
    work = norms(ops, torch.randn(CAPTURED.tokens, 8))
    with torch.inference_mode(), pytest.raises(UnrepeatableError, match=what):
        captured(ops, lambda: spoil(work()))


def test_a_kernel_that_is_not_known_to_do_the_same_again_is_told(ops):
    logits_SV, targets_S = torch.zeros(1, 8), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(UnrepeatableError, match="score_f32"):
        captured(ops, lambda: ops.score(logits_SV, targets_S, 0).logprobs_S)


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
from aserve.kernels.native.captured_calls import CAPTURED
from tests.kernels.cases import native_ops
from tests.runner.test_step_calls import captured, norms
ops = native_ops()
work = norms(ops, torch.randn(CAPTURED.tokens, 8))
work()
before = set(sys.modules)
captured(ops, work)
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"

"""Plain steps by captured calls: the same tokens as the eager way, whoever comes, goes, is taken back or waits, and
whatever is drafted.
"""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import aserve.runner.plain_steps as module
import aserve.runner.runner as runner_module
from aserve.core.ids import SeqId
from aserve.core.layout import KVLayout, lay_out
from aserve.core.plan import StepPlan
from aserve.core.ports import Proposer
from aserve.core.request import Request
from aserve.kernels.native.attention import TILE
from aserve.kernels.native.captured_calls import CapturedCalls
from aserve.kernels.native.native_ops import NativeOps
from aserve.models.checkpoint import resolve_checkpoint
from aserve.models.loader import load_model
from aserve.runner.kv_store import allocate_kv
from aserve.runner.plain_steps import PlainSteps
from aserve.runner.runner import ModelRunner
from aserve.runner.step import StepOutput
from aserve.scheduler.scheduler import Scheduler
from tests.checkpoints import VOCAB_SIZE, checkpoints
from tests.fakes import Foreseer
from tests.kernels.cases import native_ops
from tests.runner.toy import answer, chunk, fed, init, request

__all__ = ["checkpoints"]
pytestmark = pytest.mark.torch

MAX_LEN = 2 * TILE
BLOCK_SIZE = 8


@pytest.fixture
def ops() -> NativeOps:
    return native_ops()


class Counted(PlainSteps):
    """sizes: of each of those steps how many tokens it had, and sampled. drafted: tokens of those with drafts."""

    sizes: list[tuple[int, int]]
    drafted: list[int]

    def execute(self, plan: StepPlan, masked: object = None) -> StepOutput | None:
        output = super().execute(plan, masked)
        if output is not None:
            num_samples = sum(piece.num_samples for piece in plan.slices)
            self.sizes.append((plan.num_tokens, num_samples))
            if any(piece.num_samples > 1 for piece in plan.slices):
                self.drafted.append(plan.num_tokens)
        return output


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    Counted.sizes, Counted.drafted = [], []
    monkeypatch.setattr(module, "PlainSteps", Counted)
    return Counted


def runner_of(
    folder: Path, ops: NativeOps, *, num_blocks: int = 400, cache: str | None = None, **how: object
) -> tuple[ModelRunner, KVLayout]:
    """cache: its type, if it is not the model's."""
    model = load_model(resolve_checkpoint(str(folder)), device="cpu", ops=ops, max_model_len=MAX_LEN, **how)
    dtype, layout = getattr(torch, cache or str(how["dtype"])), lay_out(model.spec.windows, MAX_LEN)
    shape = {"num_blocks": num_blocks, "block_size": BLOCK_SIZE, "layout": layout}
    kv = allocate_kv(model.spec, dtype=dtype, device=torch.device("cpu"), **shape)
    return ModelRunner(model, ops, kv, max_num_seqs=8, max_model_len=MAX_LEN), layout


def run(
    requests: list[Request],
    folder: Path,
    ops: NativeOps,
    *,
    num_blocks: int = 400,
    proposer: Proposer | None = None,
    **how: object,
) -> tuple[dict[str, list[int]], int]:
    """Their tokens, and how often one was preempted."""
    runner, layout = runner_of(folder, ops, num_blocks=num_blocks, **how)
    scheduler = Scheduler(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=MAX_LEN,
        watermark=0.0,
        windows=layout.windows,
        proposer=proposer,
    )
    tokens = asyncio.run(answer(runner, scheduler, requests, depth=2))
    return tokens, scheduler.statistics().num_preemptions


def asked(seed: int, lengths: range) -> list[Request]:
    rng = random.Random(seed)
    params = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.8, "seed": 5},
        {"temperature": 1.2, "top_k": 20, "min_p": 0.01, "seed": 6},
    ]
    return [
        request(
            f"request {i}",
            [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice([5, 17, TILE - 12]))],
            max_tokens=rng.choice(lengths),
            **params[i % len(params)],
        )
        for i in range(6)
    ]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    ("recipe", "how"),
    [
        ("llama_biases", {"dtype": "float32"}),
        ("qwen2", {"dtype": "bfloat16", "quantization": "int8"}),
        ("qwen3", {"dtype": "bfloat16"}),
        ("mistral", {"dtype": "float32"}),
        ("qwen3", {"dtype": "float32", "cache": "bfloat16"}),
    ],
)
def test_its_tokens_are_those_of_the_eager_way(checkpoints, ops, counted, monkeypatch, recipe, how, num_threads):
    """Across ends of blocks and of tiles, with windows, and rows that come and go while others decode."""
    requests = asked(0, range(30, 120))
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        quick, _ = run(requests, checkpoints(recipe), ops, **how)
        monkeypatch.setattr(runner_module, "plain_steps", lambda *_: None)
        eager, _ = run(requests, checkpoints(recipe), ops, **how)
    finally:
        torch.set_num_threads(before)
    assert quick == eager
    assert {(1, 1), (2, 2), (3, 3)} <= set(counted.sizes)
    assert any(tokens > samples > 1 for tokens, samples in counted.sizes)


def test_a_prompt_in_pieces_samples_with_the_last_of_them(checkpoints, ops, counted):
    run([request("one", [7] * 150, max_tokens=2)], checkpoints("qwen2"), ops, dtype="float32")
    assert counted.sizes == [(64, 0), (64, 0), (22, 1), (1, 1)]


def test_rows_that_are_preempted_and_come_back_go_on_with_their_own_tokens(checkpoints, ops, counted, monkeypatch):
    requests = asked(1, range(60, 120))
    quick, num_preemptions = run(requests, checkpoints("qwen2"), ops, dtype="float32", num_blocks=66)
    monkeypatch.setattr(runner_module, "plain_steps", lambda *_: None)
    eager, _ = run(requests, checkpoints("qwen2"), ops, dtype="float32", num_blocks=66)
    assert quick == eager
    assert num_preemptions
    assert len(counted.sizes) > 60


class Knower(Foreseer):
    """Knows the answers, and of each token of one says now and then another."""

    most = 7

    def __init__(self, requests: list[Request], answers: dict[str, list[int]]) -> None:
        self._texts = [[*each.prompt_token_ids, *answers[each.id]] for each in requests]

    def propose(self, seq_id: SeqId, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        num = len(token_ids)
        text = next(text for text in self._texts if text[:num] == list(token_ids))
        rng = random.Random(f"{seq_id} {num}")
        return tuple(token if rng.random() < 0.8 else rng.randrange(VOCAB_SIZE) for token in text[num : num + most])

    def forget(self, seq_id: SeqId) -> None:
        """It keeps nothing."""


@pytest.mark.parametrize(
    ("recipe", "how"),
    [("qwen3", {"dtype": "bfloat16"}), ("mistral", {"dtype": "float32"})],
)
def test_with_drafts_its_tokens_are_those_of_the_eager_way_without(checkpoints, ops, counted, monkeypatch, recipe, how):
    """Alone, where every step has drafts, and among others that have none or wait for nobody."""
    requests = asked(2, range(60, 120))
    with monkeypatch.context() as patched:
        patched.setattr(runner_module, "plain_steps", lambda *_: None)
        eager, _ = run(requests, checkpoints(recipe), ops, **how)
    proposer = Knower(requests, eager)
    for some in (requests[:1], requests[1:2], requests):
        counted.drafted.clear()
        quick, _ = run(some, checkpoints(recipe), ops, proposer=proposer, **how)
        assert quick == {each.id: eager[each.id] for each in some}
        assert len(counted.drafted) > 3


@pytest.mark.parametrize(
    "params",
    [{"presence_penalty": 1.0}, {"logprobs": 2}, {"logit_bias": ((5, 1.0),)}],
)
def test_rows_with_more_than_parameters_go_the_eager_way(checkpoints, ops, counted, params):
    plain, other = request("plain", [1, 2, 3], max_tokens=30), request("other", [4, 5], max_tokens=30, **params)
    tokens, _ = run([plain, other], checkpoints("qwen2"), ops, dtype="float32")
    assert not counted.sizes
    alone, _ = run([plain], checkpoints("qwen2"), ops, dtype="float32")
    assert alone["plain"] == tokens["plain"]
    assert len(counted.sizes) > 20


def test_a_model_with_several_groups_of_layers_goes_the_eager_way(checkpoints, ops, counted):
    tokens, _ = run([request("one", [1, 2, 3], max_tokens=20)], checkpoints("qwen2_windows"), ops, dtype="float32")
    assert len(tokens["one"]) == 20
    assert not counted.sizes


def test_a_large_vocabulary_goes_the_eager_way(checkpoints, ops, counted, monkeypatch):
    monkeypatch.setattr(module, "MAX_LOGITS", 2 * VOCAB_SIZE)
    run(
        [request(f"{i}", [1 + i, 2], max_tokens=20 + 10 * i) for i in range(3)],
        checkpoints("qwen2"),
        ops,
        dtype="float32",
    )
    assert {samples for _, samples in counted.sizes} == {1, 2}


def decoded(runner: ModelRunner, starts: range) -> list[int]:
    """The tokens of a row at these positions, of which the second block begins at BLOCK_SIZE."""
    plans = (StepPlan(at, (fed(0, at, *((2,) if at == BLOCK_SIZE else ())),)) for at in starts)
    return [runner.run(plan).token_ids[0] for plan in plans]


def test_nothing_goes_on_from_a_step_that_failed(checkpoints, ops, counted, monkeypatch):
    """The step that is tried again is computed as if it had not been tried, and later ones go on from it."""
    runners = [runner_of(checkpoints("qwen2"), ops, dtype="float32")[0] for _ in range(2)]
    prompt = StepPlan(0, (chunk(0, 0, [1, 2, 3], 1),), (init(0),))
    last = 7
    try:
        whole, broken = ([runner.run(prompt).token_ids[0]] for runner in runners)
        whole += decoded(runners[0], range(3, 20))
        broken += decoded(runners[1], range(3, last))
        counted.sizes.clear()
        with monkeypatch.context() as patched:
            patched.setattr(CapturedCalls, "repeat", _raise)
            with pytest.raises(ValueError, match="this step fails"):
                decoded(runners[1], range(last, last + 1))
        asyncio.run(recovered(runners[1]))
        broken += decoded(runners[1], range(last, 20))
    finally:
        for runner in runners:
            runner.close()
    assert broken == whole
    assert len(counted.sizes) == 20 - last + 1  # a sign of life among them


def _raise(*_: object) -> None:
    raise ValueError("this step fails")


async def recovered(runner: ModelRunner) -> None:
    await runner.recover().land()

"""A model without weights that shows everything it reads: its logits are a hash of the context in the KV cache.

Keys hold tokens and values hold positions, so a slot that is wrong, stale or overwritten changes the token that comes
out. `continuation` says which tokens are right, from the tokens alone.
"""

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from aserve.core.ids import BlockId, RequestId, Row, SeqId
from aserve.core.outputs import SeqDelta
from aserve.core.params import SamplingParams
from aserve.core.plan import RowInit, RowSampling, SeqSlice, StepPlan
from aserve.core.request import Request
from aserve.kernels.cpu import CpuOps
from aserve.kernels.ops import KVLayer, Ops
from aserve.models.interface import ForwardBatch
from aserve.models.spec import ModelSpec
from aserve.runner.device import StepDevice
from aserve.runner.flight import StepFlight
from aserve.runner.kv_store import allocate_kv
from aserve.runner.runner import ModelRunner, SkippedStepError
from aserve.scheduler.scheduler import Scheduler
from tests.fakes import deltas_of

VOCAB_SIZE = 97
POISON = VOCAB_SIZE - 1
"""A context that holds this token has NaN for logits."""
BOMB = VOCAB_SIZE - 2
"""A step that holds this token raises."""
GREEDY = RowSampling()


class ToyError(Exception):
    """The step held a BOMB."""


class ToyLM:
    """A `CausalLM` of one layer. The hidden state of a token is the hash of its context."""

    spec = ModelSpec(
        architecture="ToyLM",
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        hidden_size=1,
        intermediate_size=1,
        vocab_size=VOCAB_SIZE,
        context_len=64,
        norm_eps=1e-5,
        windows=(None,),
        rope=None,
        tie_embeddings=False,
    )

    def forward(self, token_ids_T: Tensor, kv: Sequence[KVLayer], batch: ForwardBatch) -> Tensor:
        if BOMB in token_ids_T.tolist():
            raise ToyError
        assert int(token_ids_T.min()) >= 0, "an embedding has no row for this token"
        [cache], places = kv, batch.attention
        cache.k_BPKD.view(-1).index_copy_(0, places.slots_T, token_ids_T.to(cache.k_BPKD.dtype))
        cache.v_BPKD.view(-1).index_copy_(0, places.slots_T, batch.positions_T.to(cache.v_BPKD.dtype))
        hidden = []
        starts = places.query_starts_S1.tolist()
        for s, seq_len in enumerate(places.seq_lens_S.tolist()):
            blocks = places.block_table_SM[s].long()
            tokens, positions = (x[blocks].view(-1).long().tolist() for x in (cache.k_BPKD, cache.v_BPKD))
            context = list(zip(positions, tokens, strict=True))
            num_queries = starts[s + 1] - starts[s]
            hidden += [hash_of(context[: end + 1]) for end in range(seq_len - num_queries, seq_len)]
        return batch.wanted(torch.tensor(hidden, dtype=torch.float64)[:, None])

    def logits(self, hidden_SE: Tensor) -> Tensor:
        return scores(hidden_SE)


def hash_of(context: Sequence[tuple[int, int]]) -> float:
    """A number that any change to any (position, token) changes."""
    poisoned = any(token == POISON for _, token in context)
    return float("nan") if poisoned else float(zlib.crc32(repr(context).encode()) % 10007)


def scores(hidden_S1: Tensor) -> Tensor:
    """[S, V], never the largest for the two special tokens."""
    logits_SV = 3 * torch.cos(hidden_S1 * torch.arange(1, VOCAB_SIZE + 1))
    logits_SV[:, BOMB:] -= 100
    return logits_SV.float()


def continuation(prompt: Iterable[int], num_tokens: int) -> list[int]:
    """What ToyLM must say, greedily."""
    tokens = list(prompt)
    num_prompt = len(tokens)
    for _ in range(num_tokens):
        hidden = hash_of(list(enumerate(tokens)))
        tokens.append(int(scores(torch.tensor([[hidden]], dtype=torch.float64)).argmax()))
    return tokens[num_prompt:]


def toy_runner(
    *,
    num_blocks: int = 32,
    block_size: int = 4,
    max_num_seqs: int = 8,
    num_host_blocks: int = 0,
    device: StepDevice | None = None,
    ops: Ops | None = None,
) -> ModelRunner:
    kv = allocate_kv(
        ToyLM.spec, num_blocks=num_blocks, block_size=block_size, dtype=torch.float32, device=torch.device("cpu")
    )
    return ModelRunner(
        ToyLM(),
        ops or CpuOps(),
        kv,
        max_num_seqs=max_num_seqs,
        max_model_len=ToyLM.spec.context_len,
        num_host_blocks=num_host_blocks,
        device=device,
    )


def init(row: int, *blocks: int, sampling: RowSampling = GREEDY) -> RowInit:
    """Sequence 100 + row takes the row."""
    return RowInit(Row(row), SeqId(100 + row), sampling, tuple(map(BlockId, blocks)))


def chunk(row: int, start: int, tokens: Sequence[int], *blocks: int, num_samples: int = 1) -> SeqSlice:
    """Tokens from the host."""
    new_blocks = tuple(map(BlockId, blocks))
    return SeqSlice(SeqId(100 + row), Row(row), start, len(tokens), tuple(tokens), new_blocks, num_samples)


def fed(row: int, start: int, *blocks: int) -> SeqSlice:
    """The token that the row sampled last."""
    return SeqSlice(SeqId(100 + row), Row(row), start, 1, (), tuple(map(BlockId, blocks)), 1)


def until(happened: Callable[[], bool]) -> None:
    """Wait for another thread."""
    end_s = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end_s, "it never happened"
        time.sleep(0.001)


def request(name: str, prompt: Sequence[int], **params: object) -> Request:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 10, **params})
    return Request(
        id=RequestId(name),
        prompt_token_ids=tuple(prompt),
        params=sampling,
        max_tokens=sampling.max_tokens or 1,
        seed=sampling.seed or 0,
        arrival_s=0.0,
    )


async def answer(
    runner: ModelRunner, scheduler: Scheduler, requests: Sequence[Request], *, depth: int
) -> dict[str, list[int] | None]:
    """All requests' tokens, by id, with `depth` steps in flight; None for culprits. The runner is closed at the end."""
    for one in requests:
        scheduler.add(one)
    tokens: dict[str, list[int] | None] = {one.id: [] for one in requests}
    flying: deque[StepFlight] = deque()
    plans: deque[StepPlan] = deque()
    try:
        while True:
            plan = scheduler.plan(0.0) if len(flying) < min(depth, scheduler.max_in_flight) else None
            if plan is not None:
                plans.append(plan)
                flying.append(runner.launch(plan))
            elif flying:
                culprits, deltas = await _land(runner, scheduler, flying, plans.popleft())
                if not flying:
                    plans.clear()
                for name in culprits:
                    tokens[name] = None
                for delta in deltas:
                    tokens[delta.request_id] += delta.token_ids
            else:
                return tokens
    finally:
        runner.close()


async def _land(
    runner: ModelRunner, scheduler: Scheduler, flying: deque[StepFlight], plan: StepPlan
) -> tuple[Sequence[str], Sequence[SeqDelta]]:
    """Who was found to be a culprit, and what the oldest step brought. After a failure those behind it are gone."""
    try:
        result = await flying.popleft().land()
    except ToyError:
        for behind in flying:
            with suppress(SkippedStepError):
                await behind.land()
        flying.clear()
        await runner.recover().land()
        culprit = scheduler.revert(plan.step_id)
        return ([] if culprit is None else [culprit]), []
    culprits = scheduler.expel(result.failed)
    return culprits, deltas_of(scheduler.commit(result))

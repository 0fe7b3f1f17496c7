"""Ranks on a device launch the same calls of their group in the same order, of the same shapes, and wait for nothing.

On the meta device, which has shapes and no numbers: so what NCCL would be asked is seen without a GPU.
"""

import pytest
import torch
from torch import Tensor

from aserve.core.plan import StepPlan
from aserve.kernels.ops import Ops
from aserve.models.interface import CausalLM
from aserve.models.layers import DenseMethod
from aserve.models.loader import native_model
from aserve.models.rope import rope_table
from aserve.models.sharding import Group, Shard, share_of
from aserve.models.spec import read_spec
from aserve.runner.batch import BatchBuilder
from aserve.runner.controls import ControlTable
from aserve.runner.following import FollowingStep, followed
from aserve.runner.graphs import DecodeGraphs
from aserve.runner.kv_store import allocate_kv
from aserve.runner.rows import RowTable
from aserve.runner.step import EagerStep, Step
from tests.checkpoints import SHAPE
from tests.runner.test_no_sync import (
    BLOCK_SIZE,
    CHUNK_ALONE,
    CONTROLLED,
    DECODE,
    META,
    MIXED,
    NATIVES,
    PREFILL,
    SCORED,
    MetaDevice,
    MetaGraphs,
    MetaOps,
    NoWeights,
    no_waiting,
)
from tests.runner.toy import fed

pytestmark = [pytest.mark.torch, pytest.mark.slow]

Call = tuple[str, tuple[int, ...], torch.dtype]
PLANS = (PREFILL, MIXED, DECODE, CHUNK_ALONE, CONTROLLED, SCORED)


class ToldGroup(Group):
    """Remembers what it is asked."""

    def __init__(self, rank: int, size: int) -> None:
        self.calls: list[Call] = []
        self._rank, self._size = rank, size

    def _note(self, name: str, x: Tensor) -> None:
        assert x.is_contiguous()
        self.calls.append((name, tuple(x.shape), x.dtype))

    def all_reduce(self, x: Tensor) -> None:
        self._note("all_reduce", x)

    def gather(self, x: Tensor) -> list[Tensor] | None:
        self._note("gather", x)
        return [torch.empty_like(x) for _ in range(self._size)] if self._rank == 0 else None

    def broadcast(self, x: Tensor) -> None:
        self._note("broadcast", x)


class Rank:
    """A model's share, rows and a cache, without numbers."""

    def __init__(self, architecture: str, rank: int, size: int) -> None:
        self.group = ToldGroup(rank, size)
        shard = Shard(rank, size, self.group)
        spec = share_of(read_spec({"architectures": [architecture], **SHAPE, **NATIVES[architecture]}), size)
        assert spec.rope is not None
        weights = NoWeights()
        weights.shard = shard
        table = rope_table(spec.rope, spec.head_dim, spec.context_len, META)
        ops: Ops = MetaOps()
        self.model: CausalLM = native_model(architecture)(spec, ops, weights, DenseMethod(), table)
        rows = RowTable(num_rows=5, max_blocks_per_seq=8, device=META)
        kv = allocate_kv(spec, num_blocks=1, block_size=BLOCK_SIZE, dtype=torch.bfloat16, device=META)
        controls = ControlTable(num_rows=5, vocab_size=spec.vocab_size, torch_device=META, device=MetaDevice())
        self.builder = BatchBuilder(rows, controls, MetaDevice(), BLOCK_SIZE)
        own = EagerStep(self.model, ops, kv.layers, rows, self.group)
        self.step: Step = FollowingStep(own, self.group) if rank else own
        parts = MetaGraphs(), MetaDevice(), rows, self.builder, self.step
        self.graphs = DecodeGraphs(*parts, 64, in_lockstep=True)
        self.is_first = rank == 0

    def run(self, *plans: StepPlan) -> list[Call]:
        """What the group was asked in these steps; graphs take those that they have."""
        for plan in plans:
            told = plan if self.is_first else followed(plan)
            with torch.inference_mode(), no_waiting():
                if self.graphs.execute(told) is None:
                    batch = self.builder.build(told)
                    assert batch is not None
                    self.step.execute(batch)
        return self.group.calls


@pytest.mark.parametrize("architecture", NATIVES)
def test_ranks_ask_their_group_the_same(architecture: str) -> None:
    """Catches a rank that would wait for ever: one call more, or of another shape, than the others make."""
    first, second = (Rank(architecture, rank, 2).run(*PLANS) for rank in range(2))
    assert first == second
    num_layers = SHAPE["num_hidden_layers"]
    assert [name for name, _, _ in first[: 2 * num_layers + 3]] == [
        *["all_reduce"] * (1 + 2 * num_layers),  # the embedding, then two of each layer
        "gather",
        "broadcast",
    ]


def test_graphs_are_chosen_and_captured_alike() -> None:
    """What a graph pads has to be padded on all ranks."""
    ranks = [Rank("Qwen3ForCausalLM", rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.run(PREFILL, *(StepPlan(2 + k, (fed(0, 3 + k), fed(1, 11 + k))) for k in range(6)))
        with torch.inference_mode(), no_waiting():
            rank.graphs.capture_at_start_up()
        rank.run(*(StepPlan(9 + k, (fed(1, 17 + k, 4 + k),)) for k in range(4)))
    assert ranks[0].group.calls == ranks[1].group.calls
    assert ranks[0].graphs._graphs.keys() == ranks[1].graphs._graphs.keys()
    assert len(ranks[0].graphs._graphs) > 3

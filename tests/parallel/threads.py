"""Ranks as threads of one process: the same groups, shards, plans and steps as processes have, at no cost to start."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import torch

from aserve.build import load, make_options
from aserve.core.ids import AdapterId
from aserve.core.layout import lay_out
from aserve.core.plan import StepPlan
from aserve.engine import Engine, EngineParts
from aserve.kernels.dispatch import select_ops
from aserve.models.checkpoint import resolve_checkpoint
from aserve.models.loader import load_model
from aserve.models.sharding import Shard
from aserve.runner.following import followed, masked_rows
from aserve.runner.groups import MeetingFile, RankGroup
from aserve.runner.kv_store import allocate_kv
from aserve.runner.rank_messages import Run, decode_told, frame
from aserve.runner.runner import ModelRunner

T = TypeVar("T")
CPU = torch.device("cpu")


def on_ranks(size: int, work: Callable[[Shard], T], *, stay: bool = False) -> list[T]:
    """What the work comes to on each rank, in order; they have met when it begins. stay: and do not part behind it."""
    meeting = MeetingFile()

    def of(rank: int) -> T:
        group = RankGroup(rank, size, meeting.path, timeout_s=60.0)
        group.join()
        try:
            return work(Shard(rank, size, group))
        finally:
            if not stay:
                group.leave()

    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(of, range(size)))
    finally:
        if not stay:
            meeting.close()


class ThreadFollowers:
    """The `Followers` of rank 0: what they are told goes through the same bytes."""

    def __init__(self, others: list[ModelRunner]) -> None:
        self.others = others

    def run(self, plan: StepPlan, *, recovers: bool) -> None:
        framed = frame(Run(followed(plan), masked_rows(plan), recovers))
        for other in self.others:
            told = decode_told(memoryview(bytes(framed[4:])))
            assert isinstance(told, Run)
            other.follow(told.plan, told.masked, recovers=told.recovers)

    def drop(self, adapter: AdapterId) -> None:
        for other in self.others:
            other.drop(adapter)

    def capture(self) -> None:
        pass

    def check(self) -> None:
        pass

    def cause_of(self, error: BaseException) -> BaseException:
        return error


def threaded_engine(model: str, size: int, **wishes: Any) -> tuple[Engine, list[Any]]:
    """An engine whose ranks are threads, not entered yet, and the ranks' models. wishes: options."""
    parts = load(make_options(model=model, dtype="float32", device="cpu", **wishes), lambda _progress: None)
    parts.runner.close()
    config, checkpoint, ops = parts.config, resolve_checkpoint(model), select_ops(CPU)

    def of(shard: Shard) -> tuple[Any, Shard]:
        return load_model(checkpoint, device="cpu", ops=ops, dtype="float32", shard=shard), shard

    def runner(model: Any, shard: Shard, followers: ThreadFollowers | None = None) -> ModelRunner:
        layout = lay_out(model.spec.windows, model.spec.context_len)
        sizes = {"num_blocks": config.num_blocks, "block_size": config.block_size}
        kv = allocate_kv(model.spec, **sizes, dtype=torch.float32, device=CPU, layout=layout)
        return ModelRunner(
            model,
            ops,
            kv,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            num_host_blocks=config.num_host_blocks,
            shard=shard,
            followers=followers,
        )

    ranks = on_ranks(size, of, stay=True)
    others = [runner(*rank) for rank in ranks[1:]]
    first = runner(*ranks[0], ThreadFollowers(others))

    def close() -> None:
        for other in others:
            other.close()

    made: EngineParts = replace(parts, runner=first, on_close=close)
    return Engine(lambda _report: made), [model for model, _ in ranks]

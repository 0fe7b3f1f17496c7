"""Rank 0's part in loading a model on several ranks: all load at once, then meet, measure, and agree on the cache.

rank 0   start others | load | <- Loaded  | Join -> | meet | measure | <- Measured | least | Begin -> | <- Ready
rank 1                | load |  Loaded -> |         | meet | measure | Measured -> |       | runner   | Ready ->
"""

from typing import TYPE_CHECKING, Any

import msgspec

from aserve.core.config import EngineConfig, Facts, Options
from aserve.core.errors import AserveError
from aserve.models.sharding import ALONE, Shard
from aserve.parallel.task import RankTask, patience_s
from aserve.runner.rank_messages import Begin, Join, Loaded, Measured, Ready

if TYPE_CHECKING:
    import torch

    from aserve.models.checkpoint import Checkpoint
    from aserve.runner.draft_model import DraftModel
    from aserve.runner.following import SharedDrafts
    from aserve.runner.parallel import ParallelRunner
    from aserve.runner.ranks import Ranks
    from aserve.runner.runner import ModelRunner


class Team:
    """The ranks of one engine, from rank 0's side; a team of one has no others. shard: its own part of the model."""

    def __init__(self, shard: Shard = ALONE, ranks: "Ranks | None" = None) -> None:
        self.shard = shard
        self.ranks = ranks

    @property
    def lines(self) -> tuple[str, ...]:
        """For people, at start-up."""
        if self.ranks is None:
            return ()
        size = self.shard.size
        return (f"ranks: {size} processes compute each step together; the KV cache above is that of each of them",)

    def meet(self) -> None:
        """Wait until all have their weights, and connect. Raises what one of them failed of."""
        if self.ranks is None or self.shard.group is None:
            return
        self.ranks.answers(Loaded)
        self.ranks.tell(Join())
        try:
            self.shard.group.join()
        except RuntimeError as error:
            raise self.ranks.cause_of(error) from error

    def least(self, facts: Facts) -> Facts:
        """With the cache that fits all of them."""
        if self.ranks is None:
            return facts
        budgets = [measured.num_bytes for measured in self.ranks.answers(Measured)]
        return msgspec.structs.replace(facts, kv_budget_bytes=min(facts.kv_budget_bytes, *budgets))

    def begin(self, config: EngineConfig) -> None:
        """Have the others make their runners."""
        if self.ranks is None:
            return
        wanted = config.speculative_config
        num_drafts = 0 if wanted is None or wanted.model is None else wanted.num_speculative_tokens
        self.ranks.tell(
            Begin(
                num_blocks=config.num_blocks,
                block_size=config.block_size,
                num_host_blocks=config.num_host_blocks,
                max_num_seqs=config.max_num_seqs,
                max_model_len=config.max_model_len,
                num_drafts=num_drafts,
            )
        )
        self.ranks.answers(Ready)

    def drafts(self, own: "DraftModel", config: EngineConfig, device: "torch.device") -> "DraftModel | SharedDrafts":
        """What makes drafts: the model, and where there are others, they are told."""
        from aserve.runner.following import SharedDrafts

        if self.shard.group is None or config.speculative_config is None:
            return own
        most = config.speculative_config.num_speculative_tokens
        return SharedDrafts(self.shard.group, own, config.max_num_seqs, most, device)

    def runner(self, first: "ModelRunner") -> "ModelRunner | ParallelRunner":
        """The runner of all of them."""
        if self.ranks is None:
            return first
        from aserve.runner.parallel import ParallelRunner

        return ParallelRunner(first, self.ranks)

    def close(self) -> None:
        """End the others, where loading fails. Idempotent."""
        if self.ranks is not None:
            self.ranks.close()


def start_team(options: Options, checkpoint: "Checkpoint", device: "torch.device") -> Team:
    """Start the other ranks, which load from then on. device: rank 0's. Raises `AserveError` where they cannot be."""
    if options.tensor_parallel_size == 1:
        return Team()
    import torch

    from aserve.runner.groups import MeetingFile, make_group
    from aserve.runner.ranks import Ranks, python_command

    size = options.tensor_parallel_size
    num_threads = max(1, torch.get_num_threads() // size)
    meeting = MeetingFile()
    group = make_group(0, size, meeting.path, patience_s(options), device)
    found: Any = msgspec.structs.replace(options, model=str(checkpoint.path), revision=None)
    commands = [
        python_command(
            "aserve.parallel.child",
            msgspec.json.encode(RankTask(found, rank, meeting.path, num_threads)).decode(),
        )
        for rank in range(1, size)
    ]
    try:
        return Team(Shard(0, size, group), Ranks(commands, group, meeting))
    except OSError as error:
        raise AserveError(f"tensor_parallel_size {size}: no process can be started: {error}") from error

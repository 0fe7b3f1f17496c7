"""Plans of steps without a scheduler: so many rows that read their prompts and then decode, to measure a runner by."""

import random
from typing import Final

from aserve.core.ids import BlockId, Row, SeqId
from aserve.core.plan import RowInit, RowSampling, SeqSlice, StepPlan

GREEDY: Final = RowSampling()


class Rows:
    """Plans for `batch` rows that never end, each with blocks of its own from the start."""

    def __init__(self, batch: int, context: int, block_size: int, vocab_size: int, max_tokens: int) -> None:
        self._blocks_per_row = -(-(context + max_tokens) // block_size)
        self._batch, self._context, self._vocab_size = batch, context, vocab_size
        self._step_id = 0

    def prefill(self, num_tokens: int) -> list[StepPlan]:
        """Chunks of at most `num_tokens`, a row at a time."""
        rng = random.Random(0)
        plans = []
        for row in range(self._batch):
            blocks = tuple(BlockId(1 + row * self._blocks_per_row + i) for i in range(self._blocks_per_row))
            inits: tuple[RowInit, ...] = (RowInit(Row(row), SeqId(row), GREEDY, blocks),)
            for start in range(0, self._context, num_tokens):
                ids = tuple(rng.randrange(self._vocab_size) for _ in range(min(num_tokens, self._context - start)))
                last = start + len(ids) == self._context
                piece = SeqSlice(SeqId(row), Row(row), start, len(ids), ids, num_samples=int(last))
                plans.append(self._plan((piece,), inits))
                inits = ()
        return plans

    def decode(self, step: int) -> StepPlan:
        """One token for every row, the last sampled one being on the device."""
        start = self._context + step
        return self._plan(tuple(SeqSlice(SeqId(r), Row(r), start, 1, num_samples=1) for r in range(self._batch)), ())

    def _plan(self, slices: tuple[SeqSlice, ...], inits: tuple[RowInit, ...]) -> StepPlan:
        plan = StepPlan(self._step_id, slices, inits)
        self._step_id += 1
        return plan

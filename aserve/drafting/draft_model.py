"""A draft model's bookkeeping: it catches up with each sequence's tokens, then goes on by itself for some more.

It is the schedule of the large model over again: there are rows, blocks and a `num_computed`, and nothing else. What it
computes rides in the plan whose drafts it makes (`StepPlan.drafting`), so that nobody waits for it but that step:

    tokens of the sequence   a b c d e f        num_computed 4, two drafts
    first step of drafting           e f        samples the first draft, x
    second step                          x      fed on the device; samples the second draft, y
    the large model's step             f x y    verifies both

Of what it computed only positions count whose tokens were known then: x may be rejected, and is computed once more if
it was not. So it looks at a sequence's tokens alone, and need not be told what became of its drafts, of preemption or
of prefix hits. A sequence that has just come, or was not worth drafts for long, is caught up with in chunks.
After Leviathan et al. (2023); drafts are greedy.

Knows no request, no device, and no block of the large model's. Blocks and rows that are short are taken from who was
drafted for the longest time ago, which then has to be computed again if ever.
"""

from collections.abc import Sequence
from typing import Final

from aserve.core.ids import BlockId, Row, SeqId
from aserve.core.plan import TO_COME, RowInit, RowSampling, SeqSlice, StepPlan
from aserve.core.speculation import StepSeconds

GREEDY: Final = RowSampling()
NULL_BLOCK: Final = BlockId(0)


class DraftModelProposer:
    """A `Proposer`. most: drafts at most. num_blocks: of the draft model's cache, the null block included.

    num_rows: sequences that it knows at once. context_len: positions that it has. max_catch_up: tokens that are caught
    up with in a plan, at most. seconds: of its steps.
    """

    foresees = False

    def __init__(
        self,
        *,
        most: int,
        num_blocks: int,
        block_size: int,
        num_rows: int,
        context_len: int,
        max_catch_up: int,
        step_seconds: StepSeconds,
    ) -> None:
        self.most = most
        self._block_size = block_size
        self._context_len = context_len
        self._max_catch_up = max_catch_up
        self._step_seconds = step_seconds
        self._free_blocks = [BlockId(block_id) for block_id in range(num_blocks - 1, NULL_BLOCK, -1)]
        self._free_rows = [Row(row) for row in range(num_rows - 1, -1, -1)]
        self._pasts: dict[SeqId, _Past] = {}
        """Those whom it was asked about last come last."""
        self._wanted: dict[SeqId, tuple[int, ...]] = {}
        """For the plan that is being made: the tokens to catch up with."""
        self._num_wanted = 0

    def propose(self, seq_id: SeqId, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """As many as fit the model's context; () while it has to catch up for longer, or finds no room."""
        end = len(token_ids)
        num_drafts = min(most, self._context_len - end + 1)
        if num_drafts < 1 or seq_id in self._wanted:
            return ()
        past = self._pasts.pop(seq_id, None) or _Past()
        self._pasts[seq_id] = past
        stop = min(end, past.num_computed + self._max_catch_up - self._num_wanted)
        if stop <= past.num_computed or not self._make_room(past, stop + num_drafts - 1):
            return ()
        self._wanted[seq_id] = tuple(token_ids[past.num_computed : stop])
        self._num_wanted += stop - past.num_computed
        return (TO_COME,) * num_drafts if stop == end else ()

    def steps(self, step_id: int, slices: Sequence[SeqSlice]) -> tuple[StepPlan, ...]:
        """Catch up with all who were asked about, then go on for those of whose drafts the slices have some."""
        if not self._wanted:
            return ()
        nums_drafts = {piece.seq_id: piece.num_samples - 1 for piece in slices if TO_COME in piece.draft_ids}
        inits = tuple(self._init(seq_id) for seq_id in self._wanted if self._pasts[seq_id].is_new)
        first = tuple(self._catch_up(seq_id, num_samples=int(seq_id in nums_drafts)) for seq_id in self._wanted)
        steps = [StepPlan(step_id, first, inits)]
        for place in range(1, max(nums_drafts.values(), default=0)):
            going_on = [seq_id for seq_id in self._wanted if nums_drafts.get(seq_id, 0) > place]
            steps.append(StepPlan(step_id, tuple(self._go_on(seq_id, place) for seq_id in going_on)))
        self._wanted.clear()
        self._num_wanted = 0
        return tuple(steps)

    def seconds(self, num_tokens: int) -> float:
        """As the Protocol says."""
        return self._step_seconds.base + self._step_seconds.token * num_tokens

    def forget(self, seq_id: SeqId) -> None:
        """As the Protocol says."""
        self._num_wanted -= len(self._wanted.pop(seq_id, ()))
        past = self._pasts.pop(seq_id, None)
        if past is not None:
            self._free_blocks += reversed(past.block_ids)
            if past.row is not None:
                self._free_rows.append(past.row)

    def _make_room(self, past: "_Past", num_positions: int) -> bool:
        """A row, and blocks for so many positions, at the cost of whoever the plan does not want."""
        num_more = -(-num_positions // self._block_size) - len(past.block_ids)
        for seq_id in [*self._pasts]:
            if (past.row is not None or self._free_rows) and num_more <= len(self._free_blocks):
                break
            if seq_id not in self._wanted and self._pasts[seq_id] is not past:
                self.forget(seq_id)
        if (past.row is None and not self._free_rows) or num_more > len(self._free_blocks):
            return False
        if past.row is None:
            past.row = self._free_rows.pop()
        past.block_ids += [self._free_blocks.pop() for _ in range(num_more)]
        return True

    def _init(self, seq_id: SeqId) -> RowInit:
        past = self._pasts[seq_id]
        assert past.row is not None, f"sequence {seq_id} has no row"
        past.is_new = False
        return RowInit(past.row, seq_id, GREEDY)

    def _catch_up(self, seq_id: SeqId, num_samples: int) -> SeqSlice:
        past, token_ids = self._pasts[seq_id], self._wanted[seq_id]
        start, past.num_computed = past.num_computed, past.num_computed + len(token_ids)
        return past.slice(seq_id, start, token_ids, num_samples)

    def _go_on(self, seq_id: SeqId, place: int) -> SeqSlice:
        past = self._pasts[seq_id]
        return past.slice(seq_id, past.num_computed + place - 1, (), num_samples=1)


class _Past:
    """What the draft model has of a sequence. num_told: blocks that its row has been told of. is_new: whether none."""

    def __init__(self) -> None:
        self.row: Row | None = None
        self.block_ids: list[BlockId] = []
        self.num_computed = self.num_told = 0
        self.is_new = True

    def slice(self, seq_id: SeqId, start: int, token_ids: tuple[int, ...], num_samples: int) -> SeqSlice:
        """From `start` on, with the blocks that its row has not been told of."""
        assert self.row is not None, f"sequence {seq_id} has no row"
        new_blocks = tuple(self.block_ids[self.num_told :])
        self.num_told = len(self.block_ids)
        return SeqSlice(seq_id, self.row, start, max(1, len(token_ids)), token_ids, new_blocks, num_samples)

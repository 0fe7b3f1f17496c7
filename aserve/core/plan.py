"""The narrow waist: what the scheduler tells the runner each step, and what comes back.

A plan carries changes only. The runner keeps, per row, the block table, the sampling state and the last sampled token,
so a decoding sequence costs one `SeqSlice` without tokens. Plans are values: they can be logged, and a recorded list of
them replays a step sequence on another device.

    One sequence during a step (positions grow rightward):
      |<-- matched -->|<------ computed ------>|<- this slice ->|
      0          num_matched                 start       start + num_tokens
"""

import msgspec

from aserve.core.ids import BlockId, Row, SeqId


class RowSampling(msgspec.Struct, frozen=True, gc=False):
    """How the runner samples a row. temperature 0.0 is greedy; top_k 0, top_p 1.0 and min_p 0.0 are off.

    The random number for a token is a pure function of (seed, position of the token): see kernels/reference.py.
    banned_ids may not be sampled for any position below banned_before (min_tokens).
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    banned_ids: tuple[int, ...] = ()
    banned_before: int = 0


class RowInit(msgspec.Struct, frozen=True, gc=False):
    """A sequence takes a row, at admission or again after preemption. block_ids hold its matched prefix."""

    row: Row
    seq_id: SeqId
    sampling: RowSampling
    block_ids: tuple[BlockId, ...] = ()


class SeqSlice(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of a step: positions [start, start + num_tokens).

    token_ids: the tokens at those positions; () means one token, the row's last sampled one, still on the device.
    new_blocks: appended to the row's block table before the step runs.
    samples: whether the last position yields a token.
    """

    seq_id: SeqId
    row: Row
    start: int
    num_tokens: int
    token_ids: tuple[int, ...] = ()
    new_blocks: tuple[BlockId, ...] = ()
    samples: bool = False


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """One step. Rows named in `inits` are set up before any slice is read."""

    step_id: int
    slices: tuple[SeqSlice, ...]
    inits: tuple[RowInit, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward pass computes."""
        return sum(s.num_tokens for s in self.slices)


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """token_ids: one sampled token for each slice with `samples`, in the plan's order."""

    step_id: int
    token_ids: tuple[int, ...]

"""What a recording says, record by record; how it lies in a file is the business of files.py.

    Header, then in the order in which it happened:
      Arrived                  a request was added, as one of its own or as a branch of another
      Planned ... Landed       a step, by its id; up to two are under way, or a few of a small model
      TakenBack                steps that had not landed are as if they had not been
      Ended                    a sequence, whoever ended it
      CacheForgotten           nobody finds what was computed so far
    Trailer, where the writer was told to end

Times are seconds of the engine's clock. Plans are those of core/plan.py; what has no value in them, a mask, is a flag.
"""

from typing import Final

import msgspec

from aserve.core.config import EngineConfig, Options
from aserve.core.ids import AdapterId, BlockId, RequestId, Row, SeqId
from aserve.core.plan import BlockOps, RowControls, SeqSlice

FORMAT: Final = 1
HIDDEN: Final = 0
"""Stands for each token id of a plan, in a recording that has no prompts."""

Number = int | float


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    """What was recorded. started_s: seconds since 1970. model: its first name. fingerprint: of its files; "" of none.

    has_prompts: token ids of plans are told; else each is HIDDEN, and sampled ones are told by landings alone.
    has_logprobs: landings tell the logprob of each sampled token.
    """

    version: str
    started_s: float
    model: str
    fingerprint: str
    vocab_size: int
    device: str
    dtype: str
    options: Options
    config: EngineConfig
    has_prompts: bool = False
    has_logprobs: bool = False
    format: int = FORMAT


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A request at `at_s`, when the scheduler got it; arrival_s is when it came to the engine.

    num_sequences: choices, or beams. max_tokens: of each. branch_of: the request that it branches off, if it does.
    """

    at_s: float
    request_id: RequestId
    arrival_s: float
    num_prompt: int
    num_sequences: int
    max_tokens: int
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    adapter: AdapterId | None = None
    is_beam: bool = False
    scores_prompt: bool = False
    branch_of: RequestId | None = None


class Init(msgspec.Struct, frozen=True, array_like=True):
    """A `RowInit`, and whose sequence it is. columns: those of its sampling, whose seed is no float.

    num_scored: its num_logprobs. index: which choice of the request. has_mask: what it may say was masked.
    """

    row: Row
    seq_id: SeqId
    block_ids: tuple[BlockId, ...]
    columns: tuple[Number, ...]
    banned_ids: tuple[int, ...] = ()
    banned_before: int = 0
    num_scored: int | None = None
    named_ids: tuple[int, ...] = ()
    num_prompt_logprobs: int | None = None
    controls: RowControls | None = None
    adapter: AdapterId | None = None
    has_mask: bool = False
    request_id: RequestId = RequestId("")
    index: int = 0
    num_prompt: int = 0


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """A `StepPlan`."""

    step_id: int
    slices: tuple[SeqSlice, ...]
    inits: tuple[Init, ...] = ()
    block_ops: BlockOps | None = None
    drafting: tuple["Plan", ...] = ()


class Planned(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A step was planned, and launched right away. at_s: when that began."""

    at_s: float
    plan: Plan


class Landed(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A step's tokens have come. took_s: how long the device had it.

    token_ids, num_accepted, failed: as in `StepResult`. logprobs: of each token, where the header says so; None where
    its row has none.
    """

    at_s: float
    step_id: int
    took_s: float
    token_ids: tuple[int, ...]
    num_accepted: tuple[int, ...] = ()
    failed: tuple[SeqId, ...] = ()
    logprobs: tuple[float | None, ...] = ()


class TakenBack(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The steps from this one on that have not landed. was_torn: all of them, as the bookkeeping was made anew."""

    at_s: float
    step_ids: tuple[int, ...]
    was_torn: bool = False


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """A sequence has ended with so many tokens of an answer. num_cached: tokens that it found in the prefix cache.

    chain: a name for each of its first full blocks, 8 bytes each. Equal names mean equal tokens up to there. They are
    made with a key that is forgotten, so that nobody can try which tokens a name stands for.
    """

    at_s: float
    request_id: RequestId
    index: int
    num_tokens: int
    num_cached: int
    chain: tuple[bytes, ...] = ()


class CacheForgotten(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The prefix cache was emptied."""

    at_s: float


class Trailer(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The end of a recording that was ended, and why."""

    at_s: float
    reason: str


Record = Arrived | Planned | Landed | TakenBack | Ended | CacheForgotten | Trailer

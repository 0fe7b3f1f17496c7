"""Sequence: one row of tokens on its way from prompt to answer, as the scheduler knows it.

    positions   |<------- num_prefill ------->|<--------- decoded, one a step --------->|
                0            num_computed ->                                  last_position
                |<------------ on the host: token_ids ----------------->|<- in flight ->|

`num_computed` counts positions that a plan covers, whether it has landed or not. While it is below `num_prefill` the
sequence's slices carry their tokens; from there on each step computes the row's last sampled token, which may not have
come back yet. `num_prefill` is the prompt, and after a preemption the prompt and all that was generated.
Knows no other sequence, no budget, and not who changes it (the scheduler alone).
"""

from aserve.core.ids import RequestId, Row, SeqId
from aserve.core.plan import RowSampling
from aserve.core.request import Request
from aserve.kv_cache.table import BlockTable
from aserve.scheduler.states import State

SortKey = tuple[float, int]
"""Orders sequences; smaller goes first and is preempted last."""


class Sequence:
    """Read and written on the hot path, hence plain attributes.

    max_len: tokens at which it ends with reason "length", prompt included.
    last_position: the last one worth computing: it yields the token that brings max_len.
    row: its place in the runner's tables while RUNNING.
    num_cached: prompt tokens found in the prefix cache at first admission.
    resume_after: id of the newest step in flight when it was preempted. Until that has landed it may not come back,
        as a token of its may still be in the air.
    """

    __slots__ = (
        "id",
        "last_position",
        "max_len",
        "num_cached",
        "num_computed",
        "num_preemptions",
        "num_prefill",
        "request",
        "request_id",
        "resume_after",
        "row",
        "sampling",
        "sort_key",
        "state",
        "stop_ids",
        "table",
        "token_ids",
    )

    def __init__(self, seq_id: SeqId, request: Request, table: BlockTable, sort_key: SortKey, context_len: int) -> None:
        num_prompt = len(request.prompt_token_ids)
        self.id = seq_id
        self.request = request
        self.request_id: RequestId = request.id
        self.sort_key = sort_key
        self.state = State.WAITING
        self.token_ids = list(request.prompt_token_ids)
        self.stop_ids = request.stop_ids
        self.sampling = row_sampling(request)
        self.max_len = min(num_prompt + request.max_tokens, context_len)
        self.last_position = self.max_len - 2
        self.num_prefill = num_prompt
        self.num_computed = 0
        self.num_cached = 0
        self.num_preemptions = 0
        self.resume_after: int | None = None
        self.table = table
        self.row: Row | None = None

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.id} {self.state.value} {self.num_computed}/{len(self.token_ids)} "
            f"row={self.row} blocks={self.table.block_ids}>"
        )


def row_sampling(request: Request) -> RowSampling:
    """What the runner needs of a request's parameters; ending tokens are banned until min_tokens are generated."""
    params = request.params
    banned_ids = tuple(sorted(request.stop_ids)) if params.min_tokens else ()
    return RowSampling(
        temperature=0.0 if params.is_greedy else params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=request.seed,
        banned_ids=banned_ids,
        banned_before=len(request.prompt_token_ids) + params.min_tokens if banned_ids else 0,
    )

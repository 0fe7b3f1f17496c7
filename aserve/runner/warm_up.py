"""The steps that start-up runs, so that no request pays for a first call. Knows plans, and no kernel.

They are on the null block, most of them of one sequence in row 0, and leave nothing behind that a sequence could see.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from aserve.core import columns
from aserve.core.ids import AdapterId, BlockId, HostBlockId, Row, SeqId
from aserve.core.plan import BlockOps, RowControls, RowInit, RowSampling, SeqSlice, StepPlan
from aserve.runner.masks import num_mask_bytes

BLANK: Final = AdapterId(-1)
"""Of an adapter that changes nothing."""
GREEDY: Final = RowSampling()
DRAWN: Final = RowSampling(columns.NEUTRAL._replace(temperature=1.0))
FILTERED: Final = RowSampling(columns.NEUTRAL._replace(temperature=1.0, top_k=2, top_p=0.9, min_p=0.1))
CONTROLS: Final = RowControls(
    columns.NO_PENALTY._replace(presence_penalty=1.0), logit_bias=((0, 1.0),), bad_words=((0, 0),)
)
CONTROLLED: Final = RowSampling(DRAWN.columns, num_logprobs=1, controls=CONTROLS)


class AnyToken(NamedTuple):
    """The `TokenMask` that leaves everything."""

    vocab_size: int

    def advance(self, token_ids: Sequence[int]) -> None:
        """Nothing changes."""

    def masks(self, draft_ids: Sequence[int]) -> bytes:
        """All bits are 1."""
        return b"\xff" * num_mask_bytes(self.vocab_size) * (1 + len(draft_ids))


MAX_PROMPT_TOKENS: Final = 512
"""Beyond it a prompt only takes more of the same programs."""
MAX_CROWD_LEN: Final = 2048
"""Of contexts that several sequences have: long enough to be split, and soon attended to."""


def warm_up_plans(
    max_model_len: int,
    block_size: int,
    vocab_size: int,
    *,
    max_num_seqs: int,
    compiles: bool,
    can_swap: bool = False,
) -> Iterator[StepPlan]:
    """A prompt and a decoding step, which touch all that a step can touch.

    compiles: kernels are compiled at their first run, in variants for the kinds of shape that they meet. Then every
    kind of step follows: prompts by powers of two, contexts by powers of two, each way to sample, one with a mask,
    several sequences, and moves of blocks, with those to and from host memory if it can_swap.
    """
    prompt_lens, context_lens, samplings = [min(2, max_model_len)], [min(3, max_model_len)], []
    if compiles:
        prompt_lens = _powers_of_two(min(MAX_PROMPT_TOKENS, max_model_len))
        context_lens = _powers_of_two(max_model_len)
        # What is controlled or scored is float32, other logits are read in the model's type.
        narrowed = msgspec.structs.replace(CONTROLLED, columns=FILTERED.columns)
        samplings = [GREEDY, DRAWN, FILTERED, CONTROLLED, narrowed]
        samplings += map(_banning, samplings.copy())
    steps = [
        *((0, length, FILTERED) for length in prompt_lens),
        *((length - 1, 1, GREEDY) for length in context_lens),
        *((0, 1, sampling) for sampling in samplings),
    ]
    for step_id, (start, num_tokens, sampling) in enumerate(steps):
        yield one_slice(start, num_tokens, sampling, block_size, step_id)
    if compiles:
        masked = one_slice(0, 1, DRAWN, block_size, len(steps))
        inits = tuple(msgspec.structs.replace(init, mask=AnyToken(vocab_size)) for init in masked.inits)
        yield msgspec.structs.replace(masked, inits=inits)
        crowds = [*_crowds(max_num_seqs)]
        last = min(max_model_len, MAX_CROWD_LEN) - 1
        for step_id, num_seqs in enumerate(crowds, len(steps) + 1):
            yield one_slice(last, 1, GREEDY, block_size, step_id, num_seqs=num_seqs)
        here, there = BlockId(0), HostBlockId(0)
        swaps = BlockOps(swap_outs=((here, there),), swap_ins=((there, here),)) if can_swap else BlockOps()
        yield StepPlan(len(steps) + len(crowds) + 1, (), (), msgspec.structs.replace(swaps, copies=((here, here),)))


def adapted_plan(block_size: int) -> StepPlan:
    """A step of two tokens, with the blank adapter."""
    plan = one_slice(0, 2, GREEDY, block_size)
    return msgspec.structs.replace(plan, inits=tuple(msgspec.structs.replace(i, adapter=BLANK) for i in plan.inits))


def sign_of_life(row: Row, num_groups: int) -> StepPlan:
    """A step of one token, of nobody's: in a row that no sequence gets, on the null block."""
    nobody = SeqId(-1)
    piece = SeqSlice(nobody, row, 0, 1, (0,), num_samples=1)
    return StepPlan(-1, (piece,), (RowInit(row, nobody, GREEDY, (BlockId(0),) * num_groups),))


def _powers_of_two(high: int) -> list[int]:
    """2, 4, 8, ..., and high itself."""
    return [min(2**exponent, high) for exponent in range(1, high.bit_length() + 1)]


def _crowds(high: int) -> Iterator[int]:
    """2, 3, 4, 5, 6, 8, 10, 13, ..., a third more each time, and high itself.

    Attention that decodes has a variant for steps of up to a third more programs than the GPU takes at once otherwise.
    """
    num_seqs = 2
    while num_seqs < high:
        yield num_seqs
        num_seqs = max(num_seqs + 1, num_seqs * 4 // 3)
    if high > 1:
        yield high


def _banning(sampling: RowSampling) -> RowSampling:
    return msgspec.structs.replace(sampling, banned_ids=(0,), banned_before=2)


def one_slice(
    start: int, num_tokens: int, sampling: RowSampling, block_size: int, step_id: int = 0, *, num_seqs: int = 1
) -> StepPlan:
    """A slice that samples, of each of so many sequences in the first rows, on the null block.

    A single token is the row's last one, so that the way over the device is taken too.
    """
    blocks = (BlockId(0),) * -(-(start + num_tokens) // block_size)
    token_ids = (0,) * num_tokens if num_tokens > 1 else ()
    rows = range(num_seqs)
    pieces = tuple(SeqSlice(SeqId(row), Row(row), start, num_tokens, token_ids, num_samples=1) for row in rows)
    return StepPlan(step_id, pieces, tuple(RowInit(Row(row), SeqId(row), sampling, blocks) for row in rows))

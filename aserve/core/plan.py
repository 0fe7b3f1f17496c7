"""The narrow waist: what the scheduler tells the runner each step, and what comes back.

A plan carries changes only. The runner keeps, per row, the block table, the sampling state and the last sampled token,
so a decoding sequence costs one `SeqSlice` without tokens. Plans are values: they can be logged, and a recorded list of
them replays a step sequence on another device.

    One sequence during a step (positions grow rightward):
      |<-- matched -->|<------ computed ------>|<- this slice ->|
      0          num_matched                 start       start + num_tokens

A slice may end in drafts: tokens that somebody guessed (speculative decoding, Leviathan et al., 2023). The step
computes them like any, and samples at each of the last `num_samples` positions. A draft is accepted if it is the token
that was sampled at the position before it, and all drafts before it are accepted. What is behind counts for nothing:

    token_ids      7    a    b    c        num_tokens 4, num_samples 4, drafts (a, b, c)
    sampled        a    b    x    y        accepted (a, b); the tokens are a, b, x; landed up to start + 3

Drafts that a small model makes are not known when the plan is made. `TO_COME` stands for them, and the steps that make
them are in the plan: `drafting`, on rows and blocks of the small model's own.
"""

from array import array
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from aserve.core.columns import NEUTRAL, NO_PENALTY, PenaltyColumns, SamplingColumns
from aserve.core.ids import AdapterId, BlockId, HostBlockId, Row, SeqId

TO_COME: Final = -1
"""Among a slice's tokens: a draft that the plan's `drafting` makes, so that it is on the device alone."""


class RowControls(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What changes a row's logits before they are sampled, beyond the parameters that nearly every row has.

    penalties: on tokens that came before. logit_bias: (token id, added to its logit).
    allowed_ids: all others are banned; () allows all.
    bad_words: token sequences; the last token of one may not follow the rest of it.
    prompt_ids, output_ids: the history when the row is set up; what the row samples from then on is added to it.
    """

    penalties: PenaltyColumns[float] = NO_PENALTY
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()


class RowSampling(msgspec.Struct, frozen=True, gc=False):
    """How the runner samples a row. columns: the parameters that are one number.

    The random number for a token is a pure function of (seed, position of the token): see kernels/reference.py.
    banned_ids may not be sampled for any position below banned_before (min_tokens).
    num_logprobs: score each sampled token, with as many of the likeliest beside it; None scores nothing.
    named_ids: as many tokens, which are scored in place of the likeliest; () names none.
    num_prompt_logprobs: the same for the prompt's tokens, where slices have `target_ids`.
    """

    columns: SamplingColumns[float] = NEUTRAL
    banned_ids: tuple[int, ...] = ()
    banned_before: int = 0
    num_logprobs: int | None = None
    named_ids: tuple[int, ...] = ()
    num_prompt_logprobs: int | None = None
    controls: RowControls | None = None


class TokenMask(Protocol):
    """Which tokens an answer may take. The one thing in a plan that is no value: the runner tells it of each token that
    its row gets, and asks it for masks while the device computes what comes before them.
    """

    def advance(self, token_ids: Sequence[int]) -> None:
        """The answer has these tokens more."""
        ...

    def masks(self, draft_ids: Sequence[int]) -> bytes:
        """Of the next token, and of those behind each of the drafts, one mask after the other.

        A bit for each token of the vocabulary, 1 where it is allowed: token i is bit i % 8 of byte i // 8. Padded to
        whole words of 4 bytes. All 0 where nothing may follow, and behind a draft that is not allowed. The drafts have
        left nothing behind when it returns. Called in a thread of the runner's, as `advance` is.
        """
        ...


class RowInit(msgspec.Struct, frozen=True, gc=False):
    """A sequence takes a row, at admission or again after preemption. block_ids hold its matched prefix.

    adapter: by which the model is changed for this row; None for the model as it is.
    mask: of every token that the row samples; has followed what the answer has when the row is set up, and is the
        runner's from then on. None where any token may come.
    second_at: where the second of two texts begins, for an encoder that tells them apart; None where it does not.
    per_token: a model that pools makes a vector of each token, in place of one of all.
    """

    row: Row
    seq_id: SeqId
    sampling: RowSampling
    block_ids: tuple[BlockId, ...] = ()
    adapter: AdapterId | None = None
    mask: TokenMask | None = None
    second_at: int | None = None
    per_token: bool = False

    def is_plain(self, position: int) -> bool:
        """Whether one number for each parameter says all that is needed to choose the row's token for a position."""
        sampling = self.sampling
        return (
            self.adapter is None
            and sampling.controls is None
            and sampling.num_logprobs is None
            and (not sampling.banned_ids or position >= sampling.banned_before)
        )


class SeqSlice(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One sequence's share of a step: positions [start, start + num_tokens).

    token_ids: the tokens at those positions; () means one token, the row's last sampled one, still on the device.
        A draft may be TO_COME.
    new_blocks: appended to the row's block table before the step runs.
    num_samples: how many of the last positions yield a token: 0 in an unfinished chunk of a prompt, as a rule 1; k > 1
        says that the last k - 1 of `token_ids` are drafts.
    target_ids: the tokens at positions start + 1 and on, to be scored by what the slice computes; () scores nothing.
    """

    seq_id: SeqId
    row: Row
    start: int
    num_tokens: int
    token_ids: tuple[int, ...] = ()
    new_blocks: tuple[BlockId, ...] = ()
    num_samples: int = 0
    target_ids: tuple[int, ...] = ()

    @property
    def draft_ids(self) -> tuple[int, ...]:
        """Guessed tokens, at the last num_samples - 1 positions."""
        return self.token_ids[self.num_tokens - self.num_samples + 1 :] if self.num_samples > 1 else ()


class BlockOps(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Blocks to move before a step runs, in this order; within one kind no block is both read and written.

    scrubs: blocks in which what is not finite becomes 0, for on a CPU attention multiplies by 0 what lies behind the
        end of a context.
    swap_outs: device block to host block. copies: device to device, for a sequence that will write what others share.
    swap_ins: host block to device block.
    """

    scrubs: tuple[BlockId, ...] = ()
    swap_outs: tuple[tuple[BlockId, HostBlockId], ...] = ()
    copies: tuple[tuple[BlockId, BlockId], ...] = ()
    swap_ins: tuple[tuple[HostBlockId, BlockId], ...] = ()


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """One step. Blocks are moved first, then rows named in `inits` are set up, then slices run.

    slices may be empty where block_ops are not.
    drafting: steps of the draft model, before all this: what the i-th samples is the i-th draft of that sequence.
    """

    step_id: int
    slices: tuple[SeqSlice, ...]
    inits: tuple[RowInit, ...] = ()
    block_ops: BlockOps | None = None
    drafting: tuple["StepPlan", ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward pass computes."""
        return sum(s.num_tokens for s in self.slices)


class TokenScores(msgspec.Struct, frozen=True, gc=False):
    """One token's log-probability under the model's own distribution: before temperature, penalties and bans.

    rank: how many tokens are at least as likely, itself included; 1 is the likeliest.
    top_ids, top_logprobs: the likeliest tokens, best first; or those that the request names, in its order.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """token_ids: of each slice that samples, in the plan's order, its accepted drafts and the token sampled after.

    scores: for each of them, where its row has num_logprobs, else None; () when no row of the step has.
    prompt_scores: for each slice with `target_ids`, in the plan's order, the scores of those tokens.
    failed: sequences without a token: their logits were not finite, or their mask left nothing.
        What stands for their tokens means nothing.
    num_accepted: of each slice that samples, how many of its drafts; () in a step without drafts, in which each of them
        has one token.
    vectors: of each slice that samples, where the runner pools: what the model made of the whole sequence, float32, or
        of each of its tokens, one behind the other.
        Then no token is sampled, and what stands for it means nothing.
    """

    step_id: int
    token_ids: tuple[int, ...]
    scores: tuple[TokenScores | None, ...] = ()
    prompt_scores: tuple[tuple[TokenScores, ...], ...] = ()
    failed: tuple[SeqId, ...] = ()
    num_accepted: tuple[int, ...] = ()
    vectors: tuple["array[float]", ...] = ()


def num_agreeing(draft_ids: Sequence[int], sampled_ids: Sequence[int]) -> int:
    """How many drafts are accepted: up to the first that is not the token sampled at the position before it."""
    for num, (draft_id, sampled_id) in enumerate(zip(draft_ids, sampled_ids, strict=False)):
        if draft_id != sampled_id:
            return num
    return len(draft_ids)

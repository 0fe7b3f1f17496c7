"""What comes out: tokens from the scheduler (StepTokens), text for a reader (TextDelta), in the end a Completion."""

import enum
from array import array
from dataclasses import dataclass, field
from typing import Final

import msgspec

from aserve.core.explanation import Explanation
from aserve.core.ids import ChoiceId, RequestId
from aserve.core.plan import TokenScores
from aserve.core.rules import shown


class FinishReason(enum.StrEnum):
    """Why a sequence ended. ERROR reaches a reader as an exception, ABORT one who asked for it (or nobody: he left)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


DEADLINE: Final = "deadline"
"""The stop_reason, with the finish reason LENGTH, of what ended because its time was up."""


class SeqDelta(msgspec.Struct, frozen=True, gc=False):
    """Tokens that one sequence gained in a step. index: which choice of the request.

    stop_reason: the stop token id that ended it, or DEADLINE; None where an end-of-sequence token or a length did.
    num_cached_tokens: prompt tokens found in the prefix cache at first admission.
    scores: of token_ids, where the request asked for logprobs. prompt_scores: of the prompt's tokens from the second
        on, those that were computed since the last delta of the choice.
    cumulative_logprob: of a finished choice that was ranked (best_of, beam search).
    queued_s: how long the choice waited to be admitted, in seconds.
    vector: what a model that pools made of the prompt, which is all that there is.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    index: int = 0
    num_cached_tokens: int = 0
    scores: tuple[TokenScores, ...] = ()
    prompt_scores: tuple[TokenScores, ...] = ()
    cumulative_logprob: float | None = None
    queued_s: float = 0.0
    vector: "array[float] | None" = None

    def merge(self, later: "SeqDelta") -> "SeqDelta":
        """This delta followed by a later one of the same choice, as one."""
        assert self.index == later.index, "only deltas of one choice merge"
        assert self.finish_reason is None, "I19: nothing follows a terminal delta"
        return SeqDelta(
            self.request_id,
            self.token_ids + later.token_ids,
            later.finish_reason,
            later.stop_reason,
            self.index,
            self.num_cached_tokens,
            self.scores + later.scores,
            self.prompt_scores + later.prompt_scores,
            later.cumulative_logprob,
            self.queued_s,
        )


class StepTokens(msgspec.Struct, frozen=True, gc=False):
    """What readers learn from a step. A choice comes up once at most.

    choices, token_ids: side by side, for each choice that gained one token and has nothing else to tell: the token is
    not its first, has no scores and ends nothing (but perhaps a stop string, which is not looked for here).
    deltas: what the others have to tell.
    """

    choices: list[ChoiceId]
    token_ids: list[int]
    deltas: list[SeqDelta]


class RequestTimings(msgspec.Struct, frozen=True, gc=False):
    """How long a request took, in seconds from its arrival at the engine.

    queued_s: until it was first admitted to a step. first_token_s: until its first token. Both are None where there was
    no token. total_s: until the end of the choice that tells it.
    """

    queued_s: float | None
    first_token_s: float | None
    total_s: float


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """What one choice gained since the reader last looked; deltas of a choice concatenate to the whole.

    text: never ends inside a character and never contains a stop string.
    token_ids: may run ahead of text, whose end can be held back for a stop string or an unfinished character.
    stop_reason: the stop string or stop token id that ended the choice, or DEADLINE; None for end-of-sequence, length.
    num_cached_tokens: prompt tokens found in the prefix cache at first admission.
    scores, prompt_scores, cumulative_logprob, vector: as in SeqDelta. timings: of the request, in a choice's last
    delta.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    index: int = 0
    num_cached_tokens: int = 0
    scores: tuple[TokenScores, ...] = ()
    prompt_scores: tuple[TokenScores, ...] = ()
    cumulative_logprob: float | None = None
    timings: RequestTimings | None = None
    vector: "array[float] | None" = None

    def merge(self, later: "TextDelta") -> "TextDelta":
        """This delta followed by a later one of the same choice, as one."""
        assert self.index == later.index, "only deltas of one choice merge"
        assert self.finish_reason is None, "I19: nothing follows a terminal delta"
        return TextDelta(
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            finish_reason=later.finish_reason,
            stop_reason=later.stop_reason,
            index=self.index,
            num_cached_tokens=later.num_cached_tokens,
            scores=self.scores + later.scores,
            prompt_scores=self.prompt_scores + later.prompt_scores,
            cumulative_logprob=later.cumulative_logprob,
            timings=later.timings,
        )


@dataclass(frozen=True, slots=True, repr=False)
class Completion:
    """A whole answer. completion tokens are len(token_ids), the end-of-sequence token included.

    index: which choice of the request. scores, prompt_scores, cumulative_logprob: as in SeqDelta, of the whole.
    timings: how long its request waited, and took; equal answers need not have taken equal times. explanation: where
    that time went, of a request that asked for it; of all its choices together.
    """

    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    scores: tuple[TokenScores, ...] = ()
    prompt_scores: tuple[TokenScores, ...] = ()
    cumulative_logprob: float | None = None
    index: int = 0
    timings: RequestTimings | None = field(default=None, compare=False)
    explanation: Explanation | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return (
            f"Completion({shown(self.text)}, {len(self.token_ids)} tokens, finish_reason={self.finish_reason.value!r}, "
            f"stop_reason={shown(self.stop_reason)}, index={self.index})"
        )


class Transcript:
    """One choice, put together as it comes. prompt_scores: those that came with it."""

    __slots__ = ("_last", "_scores", "_texts", "_token_ids", "prompt_scores")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._scores: list[TokenScores] = []
        self.prompt_scores: tuple[TokenScores, ...] = ()
        self._last: TextDelta | None = None

    def add(self, delta: TextDelta) -> None:
        """The choice's next delta."""
        self._texts.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        self._scores.extend(delta.scores)
        self.prompt_scores += delta.prompt_scores
        self._last = delta

    def add_token(self, text: str, token_id: int) -> None:
        """A token with nothing to tell but itself."""
        self._texts.append(text)
        self._token_ids.append(token_id)

    def completion(
        self,
        prompt_token_ids: tuple[int, ...],
        prompt_scores: tuple[TokenScores, ...],
        explanation: Explanation | None = None,
    ) -> Completion:
        """The whole, after the last delta. prompt_scores: the prompt's, which its first choice brings."""
        last = self._last
        assert last is not None, "I19: a choice ends with a terminal delta"
        assert last.finish_reason is not None, "I19: a choice ends with a terminal delta"
        return Completion(
            prompt_token_ids=prompt_token_ids,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            num_cached_tokens=last.num_cached_tokens,
            scores=tuple(self._scores),
            prompt_scores=prompt_scores,
            cumulative_logprob=last.cumulative_logprob,
            index=last.index,
            timings=last.timings,
            explanation=explanation,
        )

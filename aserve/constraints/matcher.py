"""A compiled structure, and how far one answer has come in it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from llguidance import LLMatcher

from aserve.core.faults import WISHES
from aserve.core.ports import Constraint, Structure

GAVE_UP: Final = "the library gave up"
DEAD_END: Final = "no token of the vocabulary can say what has to come next"


@dataclass(frozen=True, slots=True)
class Compiled:
    """A `Structure`. matcher: at its beginning; copied, and never moved on. said: what an answer goes on from.

    ends: bits of a mask, as one number, of the tokens that end an answer. ignores_end: they are not left in a mask
    that leaves another token.
    """

    matcher: LLMatcher
    num_mask_bytes: int
    ends: int
    said: tuple[int, ...] = ()
    ignores_end: bool = False

    def constraint(self) -> Constraint:
        """As the Protocol says; takes some 5 us."""
        return MatcherConstraint(self)

    def after(self, token_ids: Sequence[int]) -> Structure:
        """As the Protocol says."""
        return replace(self, said=(*self.said, *token_ids))

    def going_on(self, *, ignores_end: bool) -> Structure:
        """As the Protocol says."""
        return self if ignores_end == self.ignores_end else replace(self, ignores_end=ignores_end)

    def without_ends(self, mask: bytes) -> bytes:
        """A mask whose answer goes on, if it may; takes a microsecond for each 16,000 tokens."""
        left = int.from_bytes(mask, "little") & ~self.ends
        return left.to_bytes(len(mask), "little") if left else mask


class MatcherConstraint:
    """A `Constraint` by llguidance, whose masks take some 10 us, and leave the GIL to others."""

    def __init__(self, structure: Compiled) -> None:
        self._structure = structure
        self._said = list(structure.said)
        self._matcher = self._caught_up()
        self._nothing = bytes(structure.num_mask_bytes)
        self._ended: str | None = None
        """Why it follows no more."""
        self.failure: str | None = None

    @property
    def num_tokens(self) -> int:
        """As the Protocol says."""
        return len(self._said) - len(self._structure.said)

    def advance(self, token_ids: Sequence[int]) -> None:
        """As the Protocol says."""
        self._said.extend(token_ids)
        if self._ended is None:
            try:
                is_told = self._matcher.consume_tokens(list(token_ids))
                self._ended = None if is_told else _error_of(self._matcher)
            except BaseException as error:  # a panic is no Exception
                self._ended = _gave_up(error)
            self.failure = self._ended

    def masks(self, draft_ids: Sequence[int] = ()) -> bytes:
        """As the Protocol says."""
        mask, failure = self._mask()
        if not draft_ids:
            self.failure = failure
            return mask
        masks, num_followed = [mask], 0
        for draft_id in draft_ids[: self.num_valid(draft_ids)]:
            if failure is not None or not self._matcher.consume_token(draft_id):
                break
            num_followed += 1
            mask, failure = self._mask()
            masks.append(mask)
        if failure is not None or not self._matcher.rollback(num_followed):
            self._matcher = self._caught_up()  # an error stays with a matcher
        self.failure = failure
        masks += [self._nothing] * (1 + len(draft_ids) - len(masks))
        return b"".join(masks)

    def forced(self) -> tuple[int, ...]:
        """As the Protocol says."""
        try:
            return () if self._ended is not None else tuple(self._matcher.compute_ff_tokens())
        except BaseException as error:  # a panic is no Exception
            self._ended = _gave_up(error)
            return ()

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """As the Protocol says."""
        return 0 if self._ended is not None else self._matcher.validate_tokens(list(token_ids))

    def _mask(self) -> tuple[bytes, str | None]:
        """Of the next token, and why it is 0."""
        matcher, nothing = self._matcher, self._nothing
        if self._ended is not None:
            return nothing, self._ended
        try:
            mask = matcher.compute_bitmask()[: len(nothing)]  # there may be a word more
        except BaseException as error:  # a panic is no Exception
            return nothing, _gave_up(error)
        if mask == nothing or matcher.is_error():
            return nothing, _error_of(matcher) if matcher.is_error() else DEAD_END
        if self._structure.ignores_end and matcher.is_accepting():
            mask = self._structure.without_ends(mask)
        return mask, None

    def _caught_up(self) -> LLMatcher:
        """A new matcher, that has followed the answer."""
        matcher = self._structure.matcher.deep_copy()
        if self._said:
            matcher.consume_tokens(self._said)
        return matcher


def _error_of(matcher: LLMatcher) -> str:
    return in_a_line(matcher.get_error()) or GAVE_UP


def _gave_up(error: BaseException) -> str:
    """What a panic comes to. Raises what is none."""
    if isinstance(error, (MemoryError, *WISHES)):
        raise error
    return GAVE_UP


def in_a_line(message: str) -> str:
    """What llguidance says, which may draw a regular expression with an arrow under it, as one line to quote."""
    lines = (line.strip() for line in message.replace("<non-verbose/>", "").splitlines())
    told = "; ".join(line for line in lines if line.strip("^ |"))
    return told if len(told) <= 200 else f"{told[:197]}..."

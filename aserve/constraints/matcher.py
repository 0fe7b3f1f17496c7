"""A compiled structure, and how far one answer has come in it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from llguidance import LLMatcher

from aserve.core.faults import WISHES
from aserve.core.ports import Constraint, Structure

GAVE_UP: Final = "the library gave up"


@dataclass(frozen=True, slots=True)
class Compiled:
    """A `Structure`. matcher: at its beginning; copied, and never moved on. said: what an answer goes on from."""

    matcher: LLMatcher
    num_mask_bytes: int
    said: tuple[int, ...] = ()

    def constraint(self) -> Constraint:
        """As the Protocol says; takes some 5 us."""
        matcher = self.matcher.deep_copy()
        if self.said:
            matcher.consume_tokens(list(self.said))
        return MatcherConstraint(matcher, self.num_mask_bytes)

    def after(self, token_ids: Sequence[int]) -> Structure:
        """As the Protocol says."""
        return replace(self, said=(*self.said, *token_ids))


class MatcherConstraint:
    """A `Constraint` by llguidance, whose masks take 11 us at the median, and leave the GIL to others."""

    def __init__(self, matcher: LLMatcher, num_mask_bytes: int) -> None:
        self._matcher = matcher
        self._num_mask_bytes = num_mask_bytes
        self.num_tokens = 0
        self.failure: str | None = None

    def advance(self, token_ids: Sequence[int]) -> None:
        """As the Protocol says."""
        self.num_tokens += len(token_ids)
        if not self._matcher.consume_tokens(list(token_ids)):
            self._fail()

    def rollback(self, num_tokens: int) -> None:
        """As the Protocol says."""
        self.num_tokens -= num_tokens
        if not self._matcher.rollback(num_tokens):
            self._fail()

    def mask(self) -> bytes:
        """As the Protocol says."""
        if self.failure is None:
            bits = self._bits()
            if self.failure is None:
                return bits[: self._num_mask_bytes]  # there may be a word more
        return bytes(self._num_mask_bytes)

    def _bits(self) -> bytes:
        try:
            bits = self._matcher.compute_bitmask()
        except BaseException as error:  # a panic is no Exception
            if isinstance(error, WISHES):
                raise
            self.failure = GAVE_UP
            return b""
        if self._matcher.is_error():
            self._fail()
        elif not any(bits):
            self.failure = "no token of the vocabulary can say what has to come next"
        return bits

    def _fail(self) -> None:
        self.failure = in_a_line(self._matcher.get_error()) or GAVE_UP


def in_a_line(message: str) -> str:
    """What llguidance says, which may draw a regular expression with an arrow under it, as one line to quote."""
    lines = (line.strip() for line in message.replace("<non-verbose/>", "").splitlines())
    told = "; ".join(line for line in lines if line.strip("^ |"))
    return told if len(told) <= 200 else f"{told[:197]}..."

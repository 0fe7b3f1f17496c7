"""Foresight: drafts of an answer that has a structure. What has to come is drafted, and what cannot come is not.

Where a grammar leaves one text only (a property's name, the rest of a choice, the end of a tag), masks leave one token
after the other: the text as the tokenizer spells it. These tokens are drafted, and computed in one step. They are
drafts like any: each is sampled under its own mask, and scored, counted and stopped at where that is asked for.

    landed  {"     forced  name "        slice  {" name "    sampled  name " :       one step in place of three

Knows neither steps nor costs.
"""

from collections.abc import Sequence as Several
from typing import Final

from aserve.core.ports import Constraint, Structure
from aserve.scheduler.sequence import Sequence

MOST_FORCED: Final = 16
"""Tokens that are drafted at once."""


class Foresight:
    """Of one answer. Has a constraint of its own, which is told of what has landed when it is asked."""

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._constraint: Constraint | None = None

    def forget(self) -> None:
        """What has landed is not to be trusted any more: begin anew."""
        self._constraint = None

    def forced(self, sequence: Sequence) -> tuple[int, ...]:
        """What has to follow the tokens that have landed; () where that is open."""
        return self._now(sequence).forced()[:MOST_FORCED]

    def possible(self, sequence: Sequence, guess: Several[int]) -> tuple[int, ...]:
        """As much of a guess as may follow them."""
        return tuple(guess[: self._now(sequence).num_valid(guess)])

    def _now(self, sequence: Sequence) -> Constraint:
        if (constraint := self._constraint) is None:
            constraint = self._constraint = self._structure.constraint()
        start = sequence.num_prompt + constraint.num_tokens
        if start < len(sequence.token_ids):
            constraint.advance(sequence.token_ids[start:])
        return constraint

"""Tally: what one choice has brought so far, for the end of an answer and for the token counts."""

from collections.abc import Sequence
from typing import Any

from aserve.core.outputs import Completion, TextDelta, Transcript
from aserve.core.plan import TokenScores

TokenIds = tuple[int, ...]


class Tally:
    """Counts the deltas of one choice; what they bring is kept only if they are added.

    prompt_scores: those that have come; of a prompt's first choice, all of them once it `has_begun`.
    """

    __slots__ = (
        "_transcript",
        "has_begun",
        "num_cached_tokens",
        "num_tokens",
        "prompt_scores",
        "prompt_token_ids",
    )

    def __init__(self, prompt_token_ids: TokenIds) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.prompt_scores: tuple[TokenScores, ...] = ()
        self.has_begun = False
        self._transcript = Transcript()

    def count(self, delta: TextDelta) -> None:
        """Take in a delta that is sent on at once."""
        self.num_tokens += len(delta.token_ids)
        self.num_cached_tokens = delta.num_cached_tokens
        self.prompt_scores += delta.prompt_scores
        self.has_begun |= bool(delta.token_ids) or delta.finish_reason is not None

    def add(self, delta: TextDelta) -> None:
        """Count a delta and keep it."""
        self.count(delta)
        self._transcript.add(delta)

    def add_token(self, text: str, token_id: int) -> None:
        """Count a token, not the first, and keep it."""
        self.num_tokens += 1
        self._transcript.add_token(text, token_id)

    def completion(self, prompt_scores: tuple[TokenScores, ...]) -> Completion:
        """All that was added, after the last delta. prompt_scores: the prompt's, which its first choice brings."""
        return self._transcript.completion(self.prompt_token_ids, prompt_scores)


def usage_of(tallies: Sequence[Tally], n: int) -> dict[str, Any]:
    """The token counts of an answer. A prompt counts once, however many choices it has."""
    prompts = tallies[::n]
    num_prompt_tokens = sum(len(tally.prompt_token_ids) for tally in prompts)
    num_completion_tokens = sum(tally.num_tokens for tally in tallies)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(tally.num_cached_tokens for tally in prompts)},
    }


def less(usage: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """The counts before so many tokens were generated."""
    return usage | {name: usage[name] - num_tokens for name in ("completion_tokens", "total_tokens")}

"""Prompt lookup: a sequence goes on as it did the last time that its newest tokens came up in it.

    tokens   ... the cat sat on the mat . The dog saw that the cat sat       newest: the cat sat
                 |-- found --| on  the  mat                                  drafts: on the mat

It costs next to nothing, and does much where an answer repeats what it was given: edits, extraction, code, quotes.
After Saxena's prompt lookup decoding (2023), and vLLM's n-gram proposer, whose parameters it has. Knows one sequence
at a time, by its id; not what becomes of a draft.
"""

from array import array
from collections.abc import Sequence
from typing import Final

from aserve.core.ids import SeqId
from aserve.core.plan import SeqSlice, StepPlan

MOST_INDEXED: Final = 2048
"""Tokens that a call indexes at most, in about a millisecond: a longer prompt is indexed over several steps."""
MOST_COMPARED: Final = 8
"""Earlier places that are looked at, the latest first, for the longest agreement."""
NOWHERE: Final = 0
"""In place of the end of an n-gram, which is never 0."""


class NgramProposer:
    """A `Proposer`. most: drafts at most. shortest, longest: how many newest tokens have to come up again.

    Of several places the one counts where most tokens agree, up to `longest`; of equals the latest.
    """

    foresees = True

    def __init__(self, *, most: int, shortest: int, longest: int) -> None:
        assert 1 <= shortest <= longest, f"n-grams of {shortest} to {longest} tokens"
        self.most = most
        self._shortest = shortest
        self._longest = longest
        self._indices: dict[SeqId, _Index] = {}

    def propose(self, seq_id: SeqId, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """What followed the newest tokens the last time; () if they are new. As the Protocol says."""
        index = self._indices.get(seq_id)
        if index is None:
            index = self._indices[seq_id] = _Index(self._shortest)
        if not index.extend(token_ids):
            return ()
        end = index.find(token_ids, self._longest)
        if end == NOWHERE:
            return ()
        period = len(token_ids) - end
        if most <= period:
            return tuple(token_ids[end : end + most])
        return tuple(token_ids[end + place % period] for place in range(most))  # it repeats itself: so it may go on

    def steps(self, step_id: int, slices: Sequence[SeqSlice]) -> tuple[StepPlan, ...]:
        """None: there is no model."""
        del step_id, slices
        return ()

    def seconds(self, num_tokens: int) -> float:
        """Nothing."""
        del num_tokens
        return 0.0

    def forget(self, seq_id: SeqId) -> None:
        """As the Protocol says."""
        self._indices.pop(seq_id, None)


class _Index:
    """Where a sequence's n-grams of one length end. The newest one is looked up before it is entered."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._last_end: dict[tuple[int, ...], int] = {}
        self._earlier_end = array("I", [NOWHERE] * length)
        """By the end of an n-gram: where the same one ended before."""

    def extend(self, token_ids: Sequence[int]) -> bool:
        """Enter the n-grams that end before the last token; False if some are left for the next call."""
        first = len(self._earlier_end)
        last = min(len(token_ids), first + MOST_INDEXED)
        newest = tuple(token_ids[first - self._length : last - 1])
        grams = zip(*(newest[place:] for place in range(self._length)), strict=False)
        for end, gram in enumerate(grams, start=first):
            self._earlier_end.append(self._last_end.get(gram, NOWHERE))
            self._last_end[gram] = end
        return last == len(token_ids)

    def find(self, token_ids: Sequence[int], longest: int) -> int:
        """Where the newest n-gram ended before, at the place where up to `longest` tokens agree; or NOWHERE."""
        num_tokens = len(token_ids)
        end = self._last_end.get(tuple(token_ids[num_tokens - self._length :]), NOWHERE)
        best, best_length = end, self._length
        for _ in range(MOST_COMPARED):
            if end == NOWHERE or best_length == longest:
                break
            length = self._length
            while length < min(longest, end) and token_ids[end - length - 1] == token_ids[num_tokens - length - 1]:
                length += 1
            if length > best_length:
                best, best_length = end, length
            end = self._earlier_end[end]
        return best

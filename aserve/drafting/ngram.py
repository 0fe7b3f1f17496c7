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

MOST_SEARCHED: Final = 65536
"""Newest tokens of a sequence that are searched, in 35 us; in under 1 ms where somebody has made them up for that."""
MOST_COMPARED: Final = 8
"""Earlier places that are looked at, the latest first, for the longest agreement."""
NOWHERE: Final = 0
"""In place of the end of an n-gram, which is never 0."""
PACKED: Final = "I"
_SIZE: Final = array(PACKED).itemsize
"""Bytes of a token, as it is searched."""


class NgramProposer:
    """A `Proposer`. most: drafts at most. shortest, longest: how many newest tokens have to come up again.

    Of several places the one counts where most tokens agree, up to `longest`; of equals the latest. Tokens are searched
    as bytes, which takes less than entering each of them into an index does.
    """

    foresees = True

    def __init__(self, *, most: int, shortest: int, longest: int) -> None:
        assert 1 <= shortest <= longest, f"n-grams of {shortest} to {longest} tokens"
        self.most = most
        self._shortest = shortest
        self._longest = longest
        self._packed: dict[SeqId, bytearray] = {}

    def propose(self, seq_id: SeqId, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """What followed the newest tokens the last time; () if they are new. As the Protocol says."""
        packed = self._packed.get(seq_id)
        if packed is None:
            packed = self._packed[seq_id] = bytearray()
        packed += array(PACKED, token_ids[len(packed) // _SIZE :])
        end = self._find(packed, token_ids)
        if end == NOWHERE:
            return ()
        period = len(token_ids) - end
        if most <= period:
            return tuple(token_ids[end : end + most])
        return tuple(token_ids[end + place % period] for place in range(most))  # it repeats itself: so it may go on

    def _find(self, packed: bytearray, token_ids: Sequence[int]) -> int:
        """Where the newest n-gram ended before, at the place where up to `longest` tokens agree; or NOWHERE."""
        num_bytes, shortest, longest = self._shortest * _SIZE, self._shortest, self._longest
        stop, num_tokens = len(packed) - _SIZE, len(token_ids)
        newest, lowest = packed[-num_bytes:], max(0, len(packed) - MOST_SEARCHED * _SIZE)
        best, best_length = NOWHERE, shortest - 1
        for _ in range(MOST_COMPARED):
            at = packed.rfind(newest, lowest, stop)
            if at < 0 or best_length == longest:
                break
            stop = at + num_bytes - 1
            if at % _SIZE:
                continue  # bytes of one token and of the next
            end, length = at // _SIZE + shortest, shortest
            while length < min(longest, end) and token_ids[end - length - 1] == token_ids[num_tokens - length - 1]:
                length += 1
            if length > best_length:
                best, best_length = end, length
        return best

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
        self._packed.pop(seq_id, None)

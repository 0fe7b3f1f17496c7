"""Tokens of an answer, which belong to its thoughts or to what it says by the text that they stand for."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from aserve.core.plan import TokenScores


class Tokens:
    """An answer's tokens by the text that they stand for, in which its parts are looked for one after the other."""

    def __init__(self, token_bytes: Callable[[Sequence[int]], Sequence[bytes]]) -> None:
        self._token_bytes = token_bytes
        self._text = bytearray()
        self._ends = [0]
        self._scores: list[TokenScores] = []
        self._place = 0  # in the text, behind the part that was found last

    def add(self, token_ids: Sequence[int], scores: Sequence[TokenScores]) -> None:
        """More of them."""
        for raw in self._token_bytes(token_ids):
            self._text += raw
            self._ends.append(len(self._text))
        self._scores.extend(scores)

    def take(self, part: str) -> tuple[int, list[TokenScores]]:
        """How many have a share in the next part, and their scores; none where its text is not the tokens' own."""
        raw = part.encode(errors="surrogatepass")
        place = self._text.find(raw, self._place)
        if place < 0 or not raw:
            return 0, []
        self._place = place + len(raw)
        first, last = bisect_right(self._ends, place) - 1, bisect_left(self._ends, self._place)
        return last - first, self._scores[first:last]

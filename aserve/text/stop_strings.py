"""Stop strings: find the first to complete in a text that comes in chunks, and hold back no more than needed.

"The first to complete wins" (of several that complete at one character, the longest): unlike "the earliest start wins"
it does not depend on how the text was cut. What is held back is the longest end of the text that a stop string begins
with. Each string has its Knuth-Morris-Pratt automaton (SIAM J. Comput. 6, 1977); a request has at most four, so
running them side by side is linear in the text. Knows nothing of tokens.
"""

from collections.abc import Sequence


class StopMatcher:
    """One pass over one text. `stop` is the string that completed, None until then; no text may follow it."""

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: none of them empty."""
        self._patterns = [(stop, _failure_table(stop)) for stop in stops]
        self._matched = [0] * len(stops)  # how many characters of each stop string the text ends with
        self._held = ""
        self.stop: str | None = None

    def feed(self, text: str) -> str:
        """What can be shown, now that `text` has come: everything before a stop string, or before a possible one."""
        assert self.stop is None, "nothing follows a stop string"
        shown_or_held = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            self.stop = self._advance(char)
            if self.stop is not None:
                self._held = ""
                return shown_or_held[: position - len(self.stop)]
        cut = len(shown_or_held) - max(self._matched, default=0)
        self._held = shown_or_held[cut:]
        return shown_or_held[:cut]

    def flush(self) -> str:
        """What was held back, once it is certain that no more text comes."""
        text, self._held = self._held, ""
        return text

    def _advance(self, char: str) -> str | None:
        """Move every automaton by one character; the longest stop string that it completes, if any."""
        completed: str | None = None
        for index, (stop, failure) in enumerate(self._patterns):
            matched = self._matched[index]
            while matched and stop[matched] != char:
                matched = failure[matched]
            if stop[matched] == char:
                matched += 1
            self._matched[index] = matched
            if matched == len(stop) and (completed is None or matched > len(completed)):
                completed = stop
        return completed


def _failure_table(stop: str) -> list[int]:
    """failure[n]: length of the longest proper prefix of stop[:n] that is also its suffix."""
    failure = [0] * (len(stop) + 1)
    matched = 0
    for length in range(2, len(stop) + 1):
        while matched and stop[matched] != stop[length - 1]:
            matched = failure[matched]
        if stop[matched] == stop[length - 1]:
            matched += 1
        failure[length] = matched
    return failure

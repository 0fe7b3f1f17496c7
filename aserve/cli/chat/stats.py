"""Stopwatch: how fast an answer came, by the clock of whoever reads it."""

import time
from collections.abc import Callable

from aserve.cli.asking.source import Ended


class Stopwatch:
    """Started when it is made. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start_s = clock()
        self._first_s: float | None = None
        self._last_s = 0.0
        self._num_pieces = 0

    def tick(self) -> None:
        """A piece has come."""
        self._last_s = self._clock()
        self._num_pieces += 1
        if self._first_s is None:
            self._first_s = self._last_s

    @property
    def has_begun(self) -> bool:
        """Whether a piece has come."""
        return self._first_s is not None

    def line(self, ended: Ended | None) -> str:
        """Tokens, tokens a second and the time to the first. ended: None where the answer was stopped."""
        if self._first_s is None:
            return "no tokens"
        told = None if ended is None else ended.num_tokens
        num_tokens = self._num_pieces if told is None else told
        about = "about " if told is None else ""
        seconds = self._last_s - self._first_s
        speed = f", {(num_tokens - 1) / seconds:.1f} tokens/s" if num_tokens > 1 and seconds > 0.0 else ""
        cut = ", cut at its length" if ended is not None and ended.finish_reason == "length" else ""
        unit = "token" if num_tokens == 1 else "tokens"
        return f"{about}{num_tokens} {unit}{speed}, the first after {self._first_s - self._start_s:.2f} s{cut}"

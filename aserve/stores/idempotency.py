"""Answers kept by the Idempotency-Key of their requests, so that who asks again gets the same, finished or running.

    first request --> KeptAnswer: begins, more, more, ends --> whoever follows it, from its beginning on
    same key again ------------^                               the same pieces; what is to come, as it comes
    same key, another request --> KeyReusedError

An answer that failed is forgotten when it ends: asked for again, it is tried again. What is kept is bounded, in bytes
and in age, the oldest going first; answers that run are as many as the engine lets run.
Knows no HTTP but a status and headers, and nothing of what an answer says.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

from aserve.core.defaults import IDEMPOTENCY_AGE_S, IDEMPOTENCY_BYTES
from aserve.core.errors import InvalidRequestError

MAX_KEY_CHARS: Final = 255
ANSWER_BYTES: Final = 1024
"""What an answer takes besides its pieces."""
PIECE_BYTES: Final = 64
"""What a piece takes besides its bytes."""

Headers = tuple[tuple[bytes, bytes], ...]


class KeyReusedError(InvalidRequestError):
    """The key of another request, which is kept or runs."""

    code = "idempotency_key_reused"

    def __init__(self) -> None:
        super().__init__("this Idempotency-Key was sent with another request before", "idempotency-key")


class KeptAnswer:
    """One answer as it comes. fingerprint: of the request. since_s: when it was asked for.

    status, headers: None and () until it begins. num_readers: who follow it now. abandoned: set when nobody is to come.
    error: what it broke off with.
    """

    def __init__(self, fingerprint: bytes, since_s: float) -> None:
        self.fingerprint = fingerprint
        self.since_s = since_s
        self.status: int | None = None
        self.headers: Headers = ()
        self.num_bytes = ANSWER_BYTES
        self.num_readers = 0
        self.has_ended = False
        self.error: BaseException | None = None
        self.abandoned = asyncio.Event()
        self._pieces: list[bytes] = []
        self._news = asyncio.Event()

    def begin(self, status: int, headers: Headers) -> None:
        """Its status and headers."""
        self.status, self.headers = status, headers
        self.num_bytes += sum(len(name) + len(value) for name, value in headers)

    def add(self, piece: bytes) -> None:
        """More of it."""
        self._pieces.append(piece)
        self.num_bytes += len(piece) + PIECE_BYTES
        self._tell()

    def end(self, error: BaseException | None = None) -> None:
        """There is no more of it. error: why, where it is not whole."""
        self.has_ended, self.error = True, error
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def pieces(self) -> AsyncIterator[bytes]:
        """All of it from the beginning on, as it comes. Raises `error` at the end of what it has, if there is one."""
        place = 0
        while True:
            news = self._news
            while place < len(self._pieces):
                place += 1
                yield self._pieces[place - 1]
            if self.has_ended and place == len(self._pieces):
                if self.error is not None:
                    raise self.error
                return
            if place == len(self._pieces):
                await news.wait()


class IdempotencyStore:
    """Answers by owner and key. max_bytes: of all that are kept; 0 keeps none. max_age_s: of one."""

    def __init__(
        self,
        *,
        max_bytes: int = IDEMPOTENCY_BYTES,
        max_age_s: float = IDEMPOTENCY_AGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._answers: dict[bytes, KeptAnswer] = {}  # the oldest first
        self._num_ended_bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def num_bytes(self) -> int:
        """Of the answers that have ended, which are what is kept for later."""
        return self._num_ended_bytes

    def find(self, name: bytes, fingerprint: bytes) -> KeptAnswer | None:
        """The answer of that name, running or finished. Raises `KeyReusedError` where it is another request's."""
        self._trim()
        answer = self._answers.get(name)
        if answer is None or answer.abandoned.is_set():
            return None
        if answer.fingerprint != fingerprint:
            raise KeyReusedError
        return answer

    def begin(self, name: bytes, fingerprint: bytes) -> KeptAnswer:
        """One that begins now, as the newest."""
        self._forget(name)
        answer = self._answers[name] = KeptAnswer(fingerprint, self._clock())
        return answer

    def settle(self, name: bytes, answer: KeptAnswer, *, is_good: bool) -> None:
        """It has ended: keep it if it is good, and there is room."""
        if self._answers.get(name) is not answer:
            return
        self._num_ended_bytes += answer.num_bytes
        if not is_good:
            self._forget(name)
        self._trim()

    def _forget(self, name: bytes) -> None:
        answer = self._answers.pop(name, None)
        if answer is not None and answer.has_ended:
            self._num_ended_bytes -= answer.num_bytes

    def _trim(self) -> None:
        """Forget those that have ended and are too old, and the oldest of them while there is too much."""
        oldest_s = self._clock() - self._max_age_s
        for name, answer in list(self._answers.items()) if self._must_trim(oldest_s) else ():
            if answer.since_s >= oldest_s and self._num_ended_bytes <= self._max_bytes:
                break
            if answer.has_ended:
                self._forget(name)

    def _must_trim(self, oldest_s: float) -> bool:
        """Without going through them, as a rule."""
        if self._num_ended_bytes > self._max_bytes:
            return True
        oldest = next(iter(self._answers.values()), None)
        return oldest is not None and oldest.since_s < oldest_s

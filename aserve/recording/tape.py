"""Tape: takes records from the engine's thread, and has a thread of its own that packs and writes them.

    engine loop --tell--> a deque --four times a second--> [hide] --> msgpack --> zlib --> file

Nobody waits for it: to tell costs an append. It ends, with a line in the log and a trailer in the file, when the file
has its size, when the disk takes no more, when records come faster than they can be written, or when one cannot be
made; the engine goes on.
"""

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from hashlib import blake2b
from typing import Final

import msgspec

from aserve.core.faults import describe
from aserve.recording.files import create, first_bytes, frame, pack
from aserve.recording.plans import Told, hidden, settled
from aserve.recording.records import Ended, Header, Planned, Record, Trailer

FLUSH_S: Final = 0.25
"""Between two writes, and what a process that is killed may lose."""
MAX_WAITING: Final = 2**16
"""Records that wait to be written."""
PACKED_AT_ONCE: Final = 64
"""Records: some 0.1 ms of the interpreter, which the engine's thread wants meanwhile."""
FRAME_RECORDS: Final = 4096
TRAILER_BYTES: Final = 256
"""Kept free for the last frame."""
MAX_REASON: Final = 160
"""Characters of it in the file."""
NAME_BYTES: Final = 8

WHOLE: Final = "the engine was closed"

_log = logging.getLogger(__name__)


class Tape:
    """A recording that is being written. Raises `ConfigError` where the file cannot be made.

    is_on: whether more is recorded. max_bytes: of the file, at most. `tell`, `give_up` and `close` are for one thread.
    """

    def __init__(self, path: str, header: Header, *, max_bytes: int) -> None:
        self.is_on = True
        self._reason = WHOLE
        self._path = path
        self._hides = not header.has_prompts
        self._max_bytes = max_bytes
        self._key = secrets.token_bytes(32)
        self._waiting: deque[Told] = deque()
        self._ending = threading.Event()
        self._file = create(path)
        self._num_bytes = 0
        self._write(first_bytes(header))
        self._thread = threading.Thread(target=self._run, name="aserve recording", daemon=True)
        self._thread.start()

    def tell(self, told: Told) -> None:
        """Have it written."""
        if self.is_on:
            self._waiting.append(told)
            if len(self._waiting) > MAX_WAITING:
                self._reason = f"over {MAX_WAITING} records waited to be written"
                self.is_on = False

    def give_up(self, error: BaseException) -> None:
        """Something could not be told: the recording ends with what came before it."""
        if self.is_on:
            self._reason = f"a record could not be made: {describe(error)}"
            self.is_on = False

    def close(self) -> None:
        """Write what waits, and the end. Idempotent."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        """In the thread: until `close`, or until the recording ends by itself."""
        try:
            with closing(self._file):
                reason = self._write_all()
                self._write(frame(pack([Trailer(time.monotonic(), reason.partition("\n")[0][:MAX_REASON])], 1)))
        except BaseException as error:  # the edge of a thread
            reason = f"cannot be written: {error.strerror}" if isinstance(error, OSError) else describe(error)
        self.is_on = False
        self._waiting.clear()
        if reason != WHOLE:
            _log.warning("the recording %s has ended after %d bytes: %s", self._path, self._num_bytes, reason)

    def _write_all(self) -> str:
        """Write until there is a reason to end; returns it."""
        while True:
            is_last = self._ending.wait(FLUSH_S) or not self.is_on
            while self._waiting:
                num_records = min(len(self._waiting), FRAME_RECORDS)
                data = frame(pack(self._oldest(num_records), num_records))
                if self._num_bytes + len(data) > self._max_bytes - TRAILER_BYTES:
                    return f"it has reached its size of {self._max_bytes} bytes"
                self._write(data)
            if is_last:
                return self._reason

    def _oldest(self, num_records: int) -> Iterator[Record]:
        """Take records off; now and then whoever waits for the interpreter has it."""
        for place in range(1, num_records + 1):
            yield self._as_written(settled(self._waiting.popleft()))
            if place % PACKED_AT_ONCE == 0:
                time.sleep(0.0)

    def _as_written(self, record: Record) -> Record:
        """Without what is not to be told."""
        if isinstance(record, Planned):
            return Planned(record.at_s, hidden(record.plan)) if self._hides else record
        if isinstance(record, Ended) and record.chain:
            return msgspec.structs.replace(record, chain=tuple(map(self._name, record.chain)))
        return record

    def _name(self, block_hash: bytes) -> bytes:
        return blake2b(block_hash, key=self._key, digest_size=NAME_BYTES).digest()

    def _write(self, data: bytes) -> None:
        """All of it. Raises OSError."""
        self._num_bytes += len(data)
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

"""The file of a recording: a line that says what it is, then frames, each of them whole or not there.

    aserve recording 1\\n | length, crc32 | zlib(header) | length, crc32 | zlib([record, record, ...]) | ...
                            4 and 4 bytes, little-endian                   msgpack

A process that is killed leaves a file that ends within a frame, which is left out. A frame whose checksum is wrong ends
the reading with an error: what is behind it cannot be told from what was not written.
"""

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from aserve.core.errors import ConfigError, RecordingError
from aserve.recording.records import FORMAT, Header, Planned, Record, TakenBack, Trailer

MAGIC: Final = b"aserve recording "
FRAME: Final = struct.Struct("<II")
ARRAY: Final = struct.Struct(">BI")
"""What an array of msgpack begins with."""
LEVEL: Final = 1
"""Of zlib: level 6 takes three times as long for files 6 to 9 % smaller, see docs/adr/0021-recordings.md."""
MAX_FRAME_BYTES: Final = 2**28
"""A length beyond that is none: the file is damaged."""
MAX_UNPACKED_BYTES: Final = 2**30

_encoder: Final = msgspec.msgpack.Encoder()
_records: Final = msgspec.msgpack.Decoder(list[Record])
_header: Final = msgspec.msgpack.Decoder(Header)


def create(path: str) -> BinaryIO:
    """A new file that its owner alone may read. Raises `ConfigError` for one that is there, or cannot be."""
    try:
        return open(path, "xb", buffering=0, opener=partial(os.open, mode=0o600))
    except FileExistsError:
        raise ConfigError(f"record: {path} exists, and a recording is written over nothing") from None
    except OSError as error:
        raise ConfigError(f"record: cannot write {path}: {error.strerror}") from None


def frame(packed: bytes) -> bytes:
    """The bytes of a frame."""
    payload = zlib.compress(packed, LEVEL)
    return FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def first_bytes(header: Header) -> bytes:
    """What a recording begins with."""
    return MAGIC + b"%d\n" % FORMAT + frame(_encoder.encode(header))


def pack(records: Iterable[Record], num_records: int) -> bytes:
    """So many records as they stand in a frame: one array of msgpack. Takes them one by one."""
    return ARRAY.pack(0xDD, num_records) + b"".join(map(_encoder.encode, records))


class Recording:
    """A file that was written. Raises `RecordingError` for what is none, or of another version.

    header: what was recorded. num_bytes: of the file. ending: after all records were read, how it ends, in words.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.ending = ""
        with self._opened() as file:
            self._check_kind(file.readline(64))
            packed = self._next(file)
            if packed is None:
                raise RecordingError(f"{self.path}: the recording ends within its header: nothing can be read of it")
            try:
                self.header = _header.decode(packed)
            except msgspec.MsgspecError as error:
                raise RecordingError(f"{self.path}: its header is not one of aserve's recordings: {error}") from None
            self._first = file.tell()
        self.num_bytes = self.path.stat().st_size

    def records(self) -> Iterator[Record]:
        """All of them, in their order. Raises `RecordingError` where the file is damaged."""
        self.ending = ""
        last: Record | None = None
        with self._opened() as file:
            file.seek(self._first)
            while (packed := self._next(file)) is not None:
                try:
                    records = _records.decode(packed)
                except msgspec.MsgspecError as error:
                    raise RecordingError(f"{self.path}: damaged before byte {file.tell()}: {error}") from None
                yield from records
                last = records[-1] if records else last
        if isinstance(last, Trailer):
            self.ending = last.reason
        elif not self.ending:
            self.ending = "it has no end: the process was ended, and what it had not written yet is missing"

    def _opened(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise RecordingError(f"{self.path}: cannot read it: {error.strerror}") from None

    def _check_kind(self, line: bytes) -> None:
        if not line.startswith(MAGIC):
            raise RecordingError(f"{self.path}: not a recording of aserve")
        if line != MAGIC + b"%d\n" % FORMAT:
            version = line[len(MAGIC) :].strip().decode("ascii", "replace")
            raise RecordingError(f"{self.path}: a recording of format {version!r}; this aserve reads {FORMAT}")

    def _next(self, file: BinaryIO) -> bytes | None:
        """The next frame, unpacked; None at the end, and where the file ends within it."""
        start, head = file.tell(), file.read(FRAME.size)
        if len(head) < FRAME.size:
            self._cut(start, len(head))
            return None
        length, checksum = FRAME.unpack(head)
        if length > MAX_FRAME_BYTES:
            raise RecordingError(f"{self.path}: damaged at byte {start}: a frame of {length} bytes")
        payload = file.read(length)
        if len(payload) < length:
            self._cut(start, FRAME.size + len(payload))
            return None
        if zlib.crc32(payload) != checksum:
            raise RecordingError(f"{self.path}: damaged at byte {start}: the checksum of a frame is wrong")
        try:
            unpacker = zlib.decompressobj()
            packed = unpacker.decompress(payload, MAX_UNPACKED_BYTES)
        except zlib.error as error:
            raise RecordingError(f"{self.path}: damaged at byte {start}: {error}") from None
        if not unpacker.eof:
            raise RecordingError(f"{self.path}: damaged at byte {start}: a frame does not end")
        return packed

    def _cut(self, start: int, num_bytes: int) -> None:
        if num_bytes:
            self.ending = f"it is cut off at byte {start}, within a frame, which is left out"


def landed_plans(recording: Recording) -> Iterator[Record]:
    """Its records without the steps that were taken back: they are as if they had not been."""
    taken_back = {
        step_id for record in recording.records() if isinstance(record, TakenBack) for step_id in record.step_ids
    }
    for record in recording.records():
        if not isinstance(record, Planned) or record.plan.step_id not in taken_back:
            yield record

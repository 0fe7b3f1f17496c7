"""What ranks tell each other by pipes: values, encoded once for all of them by msgspec.

    frame    4 bytes: length of the rest, little-endian | MessagePack

Reading and writing block; who must not wait has a thread for it.
"""

import os
import threading
from typing import Any, Final, NoReturn

import msgspec

from aserve.core.ids import AdapterId, Row
from aserve.core.plan import StepPlan

LENGTH_BYTES: Final = 4
READ_BYTES: Final = 2**16


class Join(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """Meet the other ranks."""


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """Make a runner of these sizes. num_drafts: of a sequence, that a draft model makes; 0 where none does."""

    num_blocks: int
    block_size: int
    num_host_blocks: int
    max_num_seqs: int
    max_model_len: int
    num_drafts: int


class Run(msgspec.Struct, frozen=True, array_like=True, tag="run", gc=False):
    """Compute a step. masked: rows that are set up with a mask. recovers: in a group made anew."""

    plan: StepPlan
    masked: tuple[Row, ...] = ()
    recovers: bool = False


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Read an adapter, beside steps; answered by an `AdapterRead` of the same ticket."""

    ticket: int
    adapter: AdapterId
    folder: str


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Forget an adapter, between the steps before and those after."""

    adapter: AdapterId


class Capture(msgspec.Struct, frozen=True, array_like=True, tag="capture"):
    """Capture the graphs of start-up."""


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """End, when all steps have."""


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag="loaded"):
    """The rank's share of the weights is there."""


class Measured(msgspec.Struct, frozen=True, array_like=True, tag="measured"):
    """What its device can give to a KV cache."""

    num_bytes: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Its runner is there."""


class AdapterRead(msgspec.Struct, frozen=True, array_like=True, tag="adapter_read"):
    """error: why it is not."""

    ticket: int
    error: str | None = None


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Loading has failed, or a step. kind: the error's class. message: of an `AserveError`; else where it came from.

    num_recoveries: before the step.
    """

    kind: str
    message: str
    num_recoveries: int = 0


Told = Join | Begin | Run | Load | Drop | Capture | Close
"""By rank 0."""
Answer = Loaded | Measured | Ready | AdapterRead | Failed
"""By the others."""


def _no_masks(kind: type, _value: Any) -> NoReturn:
    raise TypeError(f"a plan for other ranks brings no {kind.__name__}")


_encoder: Final = msgspec.msgpack.Encoder()
_told: Final = msgspec.msgpack.Decoder(Told, dec_hook=_no_masks)
_answer: Final = msgspec.msgpack.Decoder(Answer)


def frame(message: Told | Answer) -> bytearray:
    """A message as it goes through a pipe."""
    framed = bytearray(LENGTH_BYTES)
    _encoder.encode_into(message, framed, LENGTH_BYTES)
    framed[:LENGTH_BYTES] = (len(framed) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
    return framed


def decode_told(payload: memoryview) -> Told:
    """What rank 0 has told."""
    told: Told = _told.decode(payload)
    return told


def decode_answer(payload: memoryview) -> Answer:
    """What another rank has told it."""
    answer: Answer = _answer.decode(payload)
    return answer


class PipeReader:
    """Frames of a pipe that is read by one thread."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._buffer = bytearray()

    def read(self) -> list[memoryview] | None:
        """Wait for bytes, and give the frames that they complete, perhaps none; None when the other end is closed."""
        try:
            data = os.read(self.fd, READ_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            return None
        self._buffer += data
        frames, start = [], 0
        while len(self._buffer) - start >= LENGTH_BYTES:
            first = start + LENGTH_BYTES
            end = first + int.from_bytes(self._buffer[start:first], "little")
            if end > len(self._buffer):
                break
            frames.append(memoryview(bytes(self._buffer[first:end])))
            start = end
        del self._buffer[:start]
        return frames


class PipeWriter:
    """Writes frames whole, from any thread."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._lock = threading.Lock()

    def write(self, framed: bytearray) -> None:
        """Wait until there is room. Raises OSError where nobody reads any more."""
        with self._lock:
            rest = memoryview(framed)
            while rest:
                rest = rest[os.write(self.fd, rest) :]

"""CallTable: calls of kernels that are written down, so that all of them are made by one call from Python.

What Python takes for a call, a microsecond or two, is then taken once for a whole step, and so is Python's lock: from
the first kernel to the last other threads may have it.
"""

import ctypes
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aserve.kernels.native.library import Kernel, Library

MAX_INTEGERS: Final = 12
"""Or addresses, that a kernel takes."""
MAX_FLOATS: Final = 2
MAX_STRUCTURE: Final = 32
"""Words of 8 bytes."""


class CallTable:
    """Calls in their order. Memory that they are given by its address is kept by whoever makes the table, and has to
    stay where it is; structures are copied.

    words_CW: the calls as they lie in memory, `Call` of rows.cpp, int64: a kernel's address, what it takes, and two
    floats in the last. structures_CW: the structure that a call takes, as it lies in memory, int64.
    """

    def __init__(self, library: Library, calls: Sequence[tuple[Kernel, Sequence[Any]]]) -> None:
        self._call_all = library.call_all
        self.calls = tuple(calls)
        self.structures_CW: NDArray[np.int64] = np.zeros((len(calls), MAX_STRUCTURE), np.int64)
        rows = [_words(*call, structure) for call, structure in zip(calls, self.structures_CW, strict=True)]
        self.words_CW: NDArray[np.int64] = np.array(rows, np.int64).reshape(len(rows), MAX_INTEGERS + 2)
        self._address = self.words_CW.ctypes.data

    def change(self, calls: Sequence[int], place: int, value: int) -> None:
        """Have calls, by their places in the table, take another integer or address: their so-manieth, from 0."""
        self.words_CW[calls, 1 + place] = value

    def call(self, num_calls: int | None = None) -> None:
        """Make all calls, or the first so many."""
        self._call_all(self._address, len(self.calls) if num_calls is None else num_calls)

    def one_by_one(self, num_calls: int | None = None) -> Iterator[Kernel]:
        """Make calls, each by itself: yields its kernel when it is made, for who wants to know what each takes."""
        for place, (kernel, _) in enumerate(self.calls[:num_calls]):
            self._call_all(self._address + place * self.words_CW.strides[0], 1)
            yield kernel


def _words(kernel: Kernel, arguments: Sequence[Any], structure: NDArray[np.int64]) -> list[int]:
    """structure: where the structure goes that it takes, if it takes one."""
    integers: list[int] = []
    floats: list[float] = []
    for taken, argument in zip(kernel.argument_types, arguments, strict=True):
        if taken is ctypes.c_float:
            floats.append(argument)
        elif isinstance(argument, ctypes.Structure):
            structure.view(np.uint8)[: ctypes.sizeof(argument)] = np.frombuffer(argument, np.uint8)
            integers.append(structure.ctypes.data)
        elif isinstance(argument, ctypes.Array):
            integers.append(ctypes.addressof(argument))
        else:
            integers.append(argument or 0)
    assert len(integers) <= MAX_INTEGERS
    assert len(floats) <= MAX_FLOATS
    integers += [0] * (MAX_INTEGERS - len(integers))
    floats += [0.0] * (MAX_FLOATS - len(floats))
    return [kernel.address, *integers, *struct.unpack("=q", struct.pack("=2f", *floats))]

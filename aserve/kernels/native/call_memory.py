"""CallMemory: what captured calls hand on to each other, and where it lies in steps of any number of rows.

    calls        a = f(x)    b = g(a)    c = h(b)    d = k(c, a)
    slot 0       a...................................a
    slot 1                   b...........b           d
    slot 2                               c...........c

What is not needed at the same time shares a slot, as values share registers (Poletto and Sarkar, Linear scan register
allocation, 1999). How wide a slot's rows are is the same in each step; how many it has is not. So slots lie one behind
the other, each as long as its rows are now: what few rows need is close together, and stays in the first caches.
"""

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aserve.kernels.native.call_table import CallTable

LINE: Final = 64
"""Bytes of a line of the caches, at which each slot begins."""


class UnrepeatableError(Exception):
    """Something else was done than kernels can do again; which."""


class Places(NamedTuple):
    """What a kernel takes as its so-manieth: how many rows it computes, and where it writes them.

    count: where that is a structure, its first field; None where a call learns it otherwise. elsewhere: addresses of
    what is made for each step.
    """

    count: int | None
    out: int
    elsewhere: frozenset[int] = frozenset()


class Made(NamedTuple):
    """A tensor that was made among the calls, of so many rows. kind: which of a step's numbers of rows that is; None
    where it is none of them.
    """

    tensor: Tensor
    kind: int | None
    num_rows: int

    @property
    def row_bytes(self) -> int:
        """Of each row."""
        return self.tensor.nbytes // self.num_rows


class _Use(NamedTuple):
    """That a call takes a tensor's address, or how many rows it has. column: of the table, or 0 of its structure.

    number: bytes that the address is behind the tensor's, or what is counted for each row.
    """

    call: int
    column: int
    made: int
    number: int


class CallMemory:
    """Of a table's calls. places: of the kernel of each. made: by their calls, in any order. kept: of these tensors,
    which are read when calls have been made.

    Raises `UnrepeatableError` for a call that writes elsewhere, or takes what is not the same for each row.
    """

    def __init__(
        self, table: CallTable, places: Sequence[Places], made: Sequence[Made], kept: Sequence[Tensor]
    ) -> None:
        self._table = table
        found = _Finder(made)
        pointers, counts, counts_of_structures = _uses(table, places, made, found)
        self._shapes = [(x.dtype, x.shape[1:]) for x in kept]
        kept_places = [found.at(x.data_ptr())[0] for x in kept]
        slots = _Slots(made, pointers, dict.fromkeys(kept_places, len(table.calls)))
        slot_of = slots.of_made
        self._slots, self._kept = slots, [slot_of[place] for place in kept_places]
        self._calls, self._columns, made_P, self._offsets = _columns(pointers)
        self._slots_P = np.array([slot_of[place] for place in made_P.tolist()], np.int64)
        kinds = np.array([each.kind or 0 for each in made], np.int64)
        self._counts = [(*uses[:2], kinds[uses[2]], uses[3]) for uses in map(_columns, (counts, counts_of_structures))]
        self._memory = torch.empty(0, dtype=torch.uint8)

    def num_bytes(self, num_rows: Sequence[int]) -> int:
        """What steps with so many rows of each kind take, but for a line a slot."""
        return sum(num_rows[kind] * width for kind, width in zip(self._slots.kinds, self._slots.widths, strict=True))

    def resize(self, num_rows: Sequence[int]) -> list[Tensor]:
        """Have the calls compute so many rows of each kind, from now on. Where they will leave what is kept."""
        starts, size = self._slots.lay_out(num_rows)
        if size > len(self._memory):
            self._memory = torch.empty(max(size, 2 * len(self._memory)), dtype=torch.uint8)
        words_CW, rows = self._table.words_CW, np.array(num_rows, np.int64)
        words_CW[self._calls, self._columns] = self._memory.data_ptr() + starts[self._slots_P] + self._offsets
        for table_CW, (calls, columns, kinds, per_row) in zip(
            (words_CW, self._table.structures_CW), self._counts, strict=True
        ):
            table_CW[calls, columns] = rows[kinds] * per_row
        return [
            self._seen(int(starts[slot]), num_rows[self._slots.kinds[slot]], *shape)
            for slot, shape in zip(self._kept, self._shapes, strict=True)
        ]

    def _seen(self, start: int, num_rows: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        size = num_rows * shape.numel() * dtype.itemsize
        return self._memory[start : start + size].view(dtype).view(num_rows, *shape)


class _Finder:
    """Finds tensors by addresses."""

    def __init__(self, made: Sequence[Made]) -> None:
        self._made = made
        self._order = sorted(range(len(made)), key=lambda place: made[place].tensor.data_ptr())
        self._starts = [made[place].tensor.data_ptr() for place in self._order]

    def find(self, address: int) -> tuple[int, int] | None:
        """Which tensor lies there, and how many bytes the address is behind where it begins."""
        at = bisect_right(self._starts, address) - 1
        if at < 0 or address >= self._starts[at] + self._made[self._order[at]].tensor.nbytes:
            return None
        return self._order[at], address - self._starts[at]

    def at(self, address: int) -> tuple[int, int]:
        """As `find`. Raises `UnrepeatableError` where there is none that has rows."""
        found = self.find(address)
        if found is None or self._made[found[0]].kind is None or found[1] >= self._made[found[0]].row_bytes:
            raise UnrepeatableError("something lies where steps have no room for it")
        return found


class _Slots:
    """Which slot each tensor has that is used. of_made: by its place. kinds, widths: of each slot, which of a step's
    numbers of rows it has, and how many bytes each of them.
    """

    def __init__(self, made: Sequence[Made], pointers: Sequence[_Use], kept: dict[int, int]) -> None:
        self.of_made: dict[int, int] = {}
        self.kinds: list[int] = []
        self.widths: list[int] = []
        free_behind: list[int] = []
        last_uses = {pointer.made: pointer.call for pointer in pointers} | kept
        for pointer in pointers:
            if pointer.made in self.of_made:
                continue
            kind, row_bytes = made[pointer.made].kind or 0, made[pointer.made].row_bytes
            free = [s for s, call in enumerate(free_behind) if call < pointer.call and self.kinds[s] == kind]
            slot = min(
                free,
                key=lambda s: (self.widths[s] < row_bytes, abs(self.widths[s] - row_bytes)),
                default=len(self.widths),
            )
            if slot == len(self.widths):
                self.kinds.append(kind)
                self.widths.append(0)
                free_behind.append(0)
            self.widths[slot], free_behind[slot] = max(self.widths[slot], row_bytes), last_uses[pointer.made]
            self.of_made[pointer.made] = slot
        self._kinds_K, self._widths_K = np.array(self.kinds, np.int64), np.array(self.widths, np.int64)

    def lay_out(self, num_rows: Sequence[int]) -> tuple[NDArray[np.int64], int]:
        """Where each slot begins, in bytes, and how many they take together."""
        sizes = -(-np.array(num_rows, np.int64)[self._kinds_K] * self._widths_K // LINE) * LINE
        return sizes.cumsum() - sizes, int(sizes.sum())


def _uses(
    table: CallTable, places: Sequence[Places], made: Sequence[Made], found: _Finder
) -> tuple[list[_Use], list[_Use], list[_Use]]:
    """What of the table are addresses of made tensors, and numbers of rows, in the table and in structures."""
    pointers: list[_Use] = []
    counts: list[_Use] = []
    of_structures: list[_Use] = []
    for call, ((kernel, arguments), where) in enumerate(zip(table.calls, places, strict=True)):
        words = table.words_CW[call, 1:].tolist()
        for place, taken in enumerate(kernel.argument_types):
            if taken is ctypes.c_void_p and place not in where.elsewhere and found.find(words[place]) is not None:
                pointers.append(_Use(call, 1 + place, *found.at(words[place])))
        out, _ = found.at(words[where.out])
        if where.count is None:
            continue
        in_structure = isinstance(arguments[where.count], ctypes.Structure)
        number = int(table.structures_CW[call, 0]) if in_structure else words[where.count]
        per_row, rest = divmod(number, made[out].num_rows)
        if rest:
            raise UnrepeatableError(f"{kernel.name} of {number} rows")
        use = _Use(call, 0 if in_structure else 1 + where.count, out, per_row)
        (of_structures if in_structure else counts).append(use)
    return pointers, counts, of_structures


def _columns(uses: Sequence[_Use]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    calls, columns, made, numbers = np.array(uses, np.int64).reshape(-1, 4).T
    return calls, columns, made, numbers

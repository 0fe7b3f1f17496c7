"""Copies of whole rows, found by their ids: blocks of a cache, and embeddings. The kernel: src/rows.cpp."""

import ctypes
from typing import Any, Final

from torch import Tensor

from aserve.kernels.native.library import Kernel, Library

_POINTER: Final = ctypes.c_void_p
_INT: Final = ctypes.c_int64


class _Moves(ctypes.Structure):
    """`Moves` of rows.cpp."""

    _fields_ = (
        *((name, _INT) for name in ("num_blocks", "num_planes", "bytes")),
        *((name, _INT) for name in ("from_plane", "from_block", "to_plane", "to_block")),
    )


class NativeMoves:
    """Copies of numbers of any type."""

    def __init__(self, library: Library) -> None:
        self._move = library.function("move_blocks", [ctypes.POINTER(_Moves), *[_POINTER] * 4])

    def move(self, from_YBX: Tensor, from_N: Tensor | None, to_YBX: Tensor, to_N: Tensor | None) -> None:
        """Blocks by their ids, or None for all in order."""
        ids_N = from_N if from_N is not None else to_N
        assert ids_N is not None
        kernel, arguments = self._call(len(ids_N), from_YBX, from_N, to_YBX, to_N)
        kernel(*arguments)

    def rows_call(self, table_VE: Tensor, ids_T: Tensor, out_TE: Tensor) -> tuple[Kernel, tuple[Any, ...]]:
        """The call that writes out[t] = table[ids[t]], ids int64: an embedding. Nothing is called yet."""
        return self._call(len(ids_T), table_VE[None], ids_T, out_TE[None], None)

    def _call(
        self, num_blocks: int, from_YBX: Tensor, from_N: Tensor | None, to_YBX: Tensor, to_N: Tensor | None
    ) -> tuple[Kernel, tuple[Any, ...]]:
        assert from_YBX.stride(2) == to_YBX.stride(2) == 1
        size = from_YBX.itemsize
        strides = (size * x.stride(place) for x in (from_YBX, to_YBX) for place in (0, 1))
        moves = _Moves(num_blocks, from_YBX.shape[0], size * from_YBX.shape[2], *strides)
        return self._move, (moves, from_YBX.data_ptr(), _address(from_N), to_YBX.data_ptr(), _address(to_N))


def _address(ids_N: Tensor | None) -> int | None:
    return None if ids_N is None else ids_N.data_ptr()

"""Digest: which beginnings of prompts a replica holds, in four bytes each, and how many of a prompt's are among them.

A sorted array of 32-bit hashes. Beginnings come with all shorter ones, so that of a prompt's n hashes the longest that
is held is found by log2(n) searches. A hash that is not there is taken for one that is with a probability of
len(digest) / 2**32: of 32,768 held, 8 in a million. A Bloom filter of the same error would take 3 bytes a hash and ask
for 17 bits each time; of an error of one in a hundred, 1.2 bytes and 7 bits.
"""

import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from aserve.routing.keys import HASH_BITS

BYTES_PER_HASH: Final = HASH_BITS // 8
MAX_HASHES: Final = 32_768
"""Of a replica: 128 KiB a report."""


class Digest:
    """Of one replica. data: as `encode` made it; what is no whole hash at its end is left out."""

    __slots__ = ("_hashes",)

    def __init__(self, data: bytes = b"") -> None:
        self._hashes = array("I")
        assert self._hashes.itemsize == BYTES_PER_HASH
        self._hashes.frombytes(data[: min(len(data) // BYTES_PER_HASH, MAX_HASHES) * BYTES_PER_HASH])
        if sys.byteorder == "big":
            self._hashes.byteswap()

    def __contains__(self, key: int) -> bool:
        place = bisect_left(self._hashes, key)
        return place < len(self._hashes) and self._hashes[place] == key

    def __len__(self) -> int:
        return len(self._hashes)


def encode(hashes: Iterable[int]) -> bytes:
    """Bytes of a digest of these hashes, at most MAX_HASHES of them: little-endian, sorted."""
    ordered = array("I", sorted(hashes)[:MAX_HASHES])
    if sys.byteorder == "big":
        ordered.byteswap()
    return ordered.tobytes()


def num_leading(hashes: Sequence[int], is_held: Callable[[int], bool]) -> int:
    """How many of the first hashes are held, where each is held with all before it."""
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high) // 2
        if is_held(hashes[middle]):
            low = middle + 1
        else:
            high = middle
    return low

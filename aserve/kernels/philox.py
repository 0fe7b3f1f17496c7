"""The random number of a sampled token: a pure function of (seed, position), so that no batch can change it.

Philox-4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) is a
counter-based generator: ten rounds of multiply and exchange turn a 128-bit counter and a 64-bit key into 128 random
bits, without any state. The key is the request's seed, the counter the token's position. Written as torch integers
here; Triton's `tl.philox` gives the same bits.
"""

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF


def philox_words(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four random 32-bit words for each counter and key; all of them, and the result, int64 in [0, 2^32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply_wide(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply_wide(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def random_words(seeds_S: Tensor, positions_S: Tensor) -> Tensor:
    """One uniform 32-bit word a row, int64 in [0, 2^32): the first of Philox(key=seed, counter=position)."""
    zero = torch.zeros_like(positions_S)
    return philox_words((*_halves(positions_S), zero, zero), _halves(seeds_S))[0]


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The low and the high 32 bits of int64."""
    return x & _MASK, (x >> 32) & _MASK


def _multiply_wide(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of a 32 x 32 bit product. In two halves, for int64 holds only 63 bits of it."""
    by_low = a * (b & 0xFFFF)
    by_high = a * (b >> 16) + (by_low >> 16)
    return by_high >> 16, ((by_high & 0xFFFF) << 16) | (by_low & 0xFFFF)

"""The random number of a sampled token: a pure function of (seed, position), so that no batch can change it.

Philox-4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) is a
counter-based generator: ten rounds of multiply and exchange turn a 128-bit counter and a 64-bit key into 128 random
bits, without any state. The key is the request's seed, the counter the token's position. Written in numpy, which has
unsigned integers and is three times faster than torch on so few; Triton's `tl.philox` gives the same bits.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Words = npt.NDArray[np.uint64]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox_words(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Four random words for each counter and key. A word is 32 bits in a uint64, which holds a product of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    m0, m1, w0, w1 = (np.uint64(x) for x in (*_MULTIPLIERS, *_WEYL))
    for _ in range(_ROUNDS):
        product0, product1 = c0 * m0, c2 * m1
        c0, c1 = (product1 >> _HALF) ^ c1 ^ k0, product1 & _MASK
        c2, c3 = (product0 >> _HALF) ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + w0) & _MASK, (k1 + w1) & _MASK
    return c0, c1, c2, c3


def random_words(seeds_S: Tensor, positions_S: Tensor) -> Tensor:
    """One uniform 32-bit word a row, int64 in [0, 2^32): the first of Philox(key=seed, counter=position).

    Reads its int64 tensors on the host.
    """
    seeds, positions = (x.cpu().numpy().view(np.uint64) for x in (seeds_S, positions_S))
    zero = np.zeros_like(positions)
    words = philox_words((positions & _MASK, positions >> _HALF, zero, zero), (seeds & _MASK, seeds >> _HALF))
    return torch.from_numpy(words[0].view(np.int64))

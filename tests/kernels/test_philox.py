import numpy as np
import pytest
import torch

from aserve.kernels.philox import philox_words, random_words

pytestmark = pytest.mark.torch

# Random123 1.14, examples/kat_vectors: philox4x32-10; counter, key, expected.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], dtype=np.uint64) for value in values)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert tuple(int(word[0]) for word in philox_words(words(*counter), words(*key))) == expected


def test_the_seed_is_the_key_and_the_position_the_counter() -> None:
    low, high = 0x89ABCDEF, 0x01234567
    expected = philox_words(words(3, 5, 0, 0), words(low, high))[0]
    assert random_words(torch.tensor([high << 32 | low]), torch.tensor([5 << 32 | 3])).tolist() == expected.tolist()


def test_negative_seeds_are_their_own_bits() -> None:
    drawn = random_words(torch.tensor([-1, -(2**63)]), torch.tensor([0, 0]))
    assert ((drawn >= 0) & (drawn < 2**32)).all()
    assert drawn[0] != drawn[1]

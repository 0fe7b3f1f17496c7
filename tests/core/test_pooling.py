"""What is made of vectors."""

from array import array

import pytest

from aserve.core.pooling import ACTIVATIONS, cosine


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_a_cosine_does_not_depend_on_how_long_vectors_are(size: float):
    one, other = array("f", [3 * size, 4 * size]), array("f", [4 * size, 3 * size])
    assert cosine(one, other) == pytest.approx(24 / 25)
    assert cosine(one, array("f", [0.0, 0.0])) == 0.0


@pytest.mark.parametrize("shift", [-2000.0, 0.0, 2000.0])
def test_shares_of_scores_depend_on_how_far_apart_they_are_alone(shift: float):
    shares = ACTIVATIONS["softmax"](array("f", [shift, shift + 1.0]))
    assert list(shares) == pytest.approx([0.26894, 0.73106], abs=1e-4)

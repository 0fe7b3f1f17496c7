"""The rules of a struct's fields: which of its values they look at."""

import msgspec
import pytest

from aserve.core.errors import InvalidRequestError
from aserve.core.rules import Refused, Rules


def test_a_default_that_is_kept_as_it_is_is_looked_at_once_and_any_other_value_each_time():
    """Catches a default that its rule changes and that is kept as it was, and the defaults of another struct."""
    asked = []

    def small(value):
        asked.append(value)
        if value > 9:
            raise Refused("at most 9")
        return value

    rules = Rules(InvalidRequestError, {"needed": small, "size": small, "items": tuple})

    class One(msgspec.Struct):
        needed: int
        size: int = 3
        items: object = []

        def __post_init__(self):
            rules.settle(self)

    class Other(One):
        size: int = 4

    assert [(one.size, one.items) for one in (One(1), One(2), Other(5), Other(6))] == [
        (3, ()),
        (3, ()),
        (4, ()),
        (4, ()),
    ]
    assert asked == [3, 1, 2, 4, 5, 6]
    assert Other(7, size=3, items=[1]).items == (1,)
    assert asked[6:] == [7, 3]
    with pytest.raises(InvalidRequestError, match="size must be at most 9, got 10"):
        One(1, size=10)

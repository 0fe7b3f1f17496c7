"""Numbers of a schema: llguidance keeps them as doubles, and is given none that it would round or overflow with."""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from aserve.constraints.places import escaped, refused
from aserve.core.rules import shown

MAX_BOUND: Final = 2**53 - 1
"""Of minimum, maximum and the exclusive ones, either way: up to here doubles tell whole numbers apart."""
MAX_WHOLE: Final = 2**63
"""Beyond it llguidance has no whole numbers."""
MAX_VALUE_DEPTH: Final = 64
"""Of arrays and objects in const, enum and annotations, as in a request's body."""


def is_bound(value: Any) -> bool:
    """Whether it is a number to which others are held exactly."""
    return _is_number(value) and abs(value) <= MAX_BOUND


def check_value(place: str, value: Any, *, is_enforced: bool) -> None:
    """A const, an enum or an annotation. is_enforced: an answer has to say it; any other need be no more than JSON.

    Raises `InvalidRequestError` at the place of a number that cannot be kept, or where it is nested too deep.
    """
    parts = [(place, value, 0)]
    while parts:
        at, part, depth = parts.pop()
        if isinstance(part, Mapping | list | tuple):
            if depth == MAX_VALUE_DEPTH:
                raise refused(place, f"values may be nested {MAX_VALUE_DEPTH} deep")
            items = part.items() if isinstance(part, Mapping) else enumerate(part)
            parts.extend((f"{at}/{escaped(str(name))}", item, depth + 1) for name, item in items)
        elif _is_number(part):
            _check_number(at, part, is_enforced=is_enforced)


def _check_number(place: str, number: float, *, is_enforced: bool) -> None:
    if not _is_finite(number):
        raise refused(place, f"must be a number within a double's range, got {shown(number)}")
    if is_enforced and not _is_exact(number):
        raise refused(
            place,
            f"must be a number that a double keeps to the last digit, as all whole numbers up to {MAX_BOUND}, and "
            f"under 2**63, got {shown(number)}; a string may be any",
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an int of too many digits
        return False


def _is_exact(number: float) -> bool:
    """Whether an answer says this number and no other. Large fractions are told in the fewest digits, and zeros."""
    if abs(number) <= MAX_BOUND:
        return True
    told = number if isinstance(number, int) else int(Decimal(repr(number)))
    return abs(number) < MAX_WHOLE and int(float(number)) == int(number) == told

"""Numbers of a schema: llguidance keeps them as doubles, and is given none that it would round, overflow or let by."""

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
LEAST: Final = 1e-30
"""Stands for the number next to 0 where 0 is excluded."""
LOWER: Final = frozenset({"minimum", "exclusiveMinimum"})
UPPER: Final = frozenset({"maximum", "exclusiveMaximum"})
EXCLUSIVE: Final = (
    ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), 1),
    ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), -1),
)
"""An exclusive bound, the inclusive one of that side, those of the other side, and where valid numbers are."""


def is_bound(value: Any) -> bool:
    """Whether it is a number to which others are held exactly."""
    return _is_number(value) and abs(value) <= MAX_BOUND


def is_lower(value: Any) -> bool:
    """Whether it is a bound, or so far below all of them that the least stands for it; see `clipped`."""
    return _is_number(value) and _is_finite(value) and value <= MAX_BOUND


def is_upper(value: Any) -> bool:
    """Likewise, above."""
    return _is_number(value) and _is_finite(value) and value >= -MAX_BOUND


def clipped(keyword: str, value: float) -> float:
    """A bound; the farthest that is exact, in place of one that is farther away: fewer numbers, all of them valid."""
    return max(value, -MAX_BOUND) if keyword in LOWER else min(value, MAX_BOUND)


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


def without_slips(part: Mapping[str, Any], *, is_joined: bool) -> dict[str, Any]:
    """A schema, checked, with no exclusive bound that llguidance would admit: a whole number, the other bound within 1.

    A number right beside it is the bound then. is_joined: the other bound may be elsewhere.
    """
    made = dict(part)
    for exclusive, inclusive, others, sign in EXCLUSIVE:
        bound = part.get(exclusive)
        if bound is None or bound != int(bound) or bound * sign < 0:  # of a unit, the end that is nearer to 0
            continue
        if is_joined or any(other in part and abs(part[other] - bound) < 1 for other in others):
            beside = sign * LEAST if not bound else _beside(int(bound), sign)
            del made[exclusive]
            made[inclusive] = max(made.get(inclusive, beside) * sign, beside * sign) * sign
    return made


def _beside(bound: int, sign: int) -> float:
    """A number next to a whole one, with no more than the 15 digits that llguidance reads without rounding."""
    return float(bound + Decimal(sign).scaleb(min(len(str(abs(bound))) - 15, 0)))

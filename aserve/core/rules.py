"""Rules: which values a field takes that a user sets, and the shape in which they are kept.

    a user, in Python or over HTTP --value--> rule --> the value as it is kept: a tuple for a list, an int for numpy's
                                                '--> an error: the field, what is allowed, what was given

Types are strict, as in JSON: True is no number, 1.5 and 1.0 are no integers, b"" is no text. A rule costs well under a
microsecond for a value that is kept as it is, for they are applied to the parameters of every request.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sized
from contextlib import suppress
from numbers import Real
from operator import index
from os import PathLike, fspath
from reprlib import Repr
from typing import Any, Final, SupportsIndex

import msgspec

from aserve.core.errors import AserveError, InvalidRequestError

MAX_INT: Final = 2**31 - 1
NO_SEQUENCES: Final = (str, bytes, bytearray, set, frozenset, Mapping)
"""What has items, but not one after the other, or not as such."""
_TOKEN_ID: Final = re.compile(r"[0-9]{1,10}")

Rule = Callable[[Any], Any]
"""The value as it is kept. Raises `Refused`."""
ErrorMaker = Callable[[str, str], AserveError]
"""The error of a message and a field's name."""


class Refused(Exception):
    """A value that a rule does not allow. given: in words, where the value itself would not tell."""

    def __init__(self, allowed: str, given: str = "") -> None:
        self.allowed = allowed
        self.given = given


def check(field: str, rule: Rule, value: object, error: ErrorMaker = InvalidRequestError) -> Any:
    """The value as it is kept. Raises the error that names the field, what is allowed and what was given."""
    try:
        return rule(value)
    except Refused as refused:
        given = refused.given or shown(value)
        raise error(f"{field} must be {refused.allowed}, got {given}", field) from None


class Rules:
    """The rules of a frozen struct's fields."""

    def __init__(self, error: ErrorMaker, rules: Mapping[str, Rule]) -> None:
        self._error = error
        self._rules = tuple(rules.items())
        self._good: dict[type[msgspec.Struct], dict[str, object]] = {}

    @property
    def fields(self) -> frozenset[str]:
        """The fields that have a rule."""
        return frozenset(field for field, _ in self._rules)

    def check(self, field: str, value: object) -> Any:
        """One field's value as it is kept; raises the error of its rule."""
        return check(field, dict(self._rules)[field], value, self._error)

    def settle(self, struct: msgspec.Struct) -> None:
        """Check the fields of a struct that is being made, and keep each value as its rule says.

        A default that its rule keeps as it is needs no second look: of thirty fields a request names three.
        """
        if (good := self._good.get(type(struct))) is None:
            good = self._good[type(struct)] = self._good_defaults(type(struct))
        for field, rule in self._rules:
            value = getattr(struct, field)
            if value is good.get(field, _NONE):
                continue
            kept = check(field, rule, value, self._error)
            if kept is not value:
                msgspec.structs.force_setattr(struct, field, kept)

    def _good_defaults(self, struct: type[msgspec.Struct]) -> dict[str, object]:
        """The defaults of fields that their rules keep as they are."""
        defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
        known = [(name, rule) for name, rule in self._rules if defaults[name] is not msgspec.NODEFAULT]
        return {name: defaults[name] for name, rule in known if rule(defaults[name]) is defaults[name]}


_NONE: Final = object()
"""No field's value."""


def optional(rule: Rule) -> Rule:
    """None, or what the rule takes."""
    return lambda value: None if value is None else rule(value)


def several(rule: Rule) -> Rule:
    """What a rule takes that gives a tuple, or None for none."""
    return lambda value: () if value is None else rule(value)


def flag(value: object) -> bool:
    """True or False."""
    if value is True or value is False:
        return bool(value)
    raise Refused("True or False")


def integer(low: int, high: int) -> Rule:
    """An integer within these bounds, which are allowed."""
    bounds = f"in [{low}, {high}]"

    def keep(value: object) -> int:
        number = value if type(value) is int else _index(value, f"an integer {bounds}")
        if low <= number <= high:
            return number
        raise Refused(bounds)

    return keep


def count(high: int = MAX_INT) -> Rule:
    """How many there are: one at least."""

    def keep(value: object) -> int:
        number = value if type(value) is int else _index(value, f"an integer in [1, {high}]")
        if 1 <= number <= high:
            return number
        raise Refused("at least 1" if number < 1 else f"at most {high}")

    return keep


def number(low: float, high: float, *, low_open: bool = False, high_open: bool = False, unit: str = "") -> Rule:
    """A finite number within these bounds, which are allowed unless they are open."""
    bounds = f"in {'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}{unit and f' {unit}'}"

    def keep(value: object) -> float:
        number = value if type(value) is float else _float(value, f"a number {bounds}")
        if low < number < high or (number == low and not low_open) or (number == high and not high_open):
            return number
        raise Refused(bounds)  # NaN too: it is equal to nothing

    return keep


def one_of(*words: str) -> Rule:
    """One of these words."""
    allowed = f"one of {', '.join(words)}"

    def keep(value: object) -> str:
        if isinstance(value, str) and value in words:
            return text(value)
        raise Refused(allowed)

    return keep


def text(value: object) -> str:
    """A string."""
    return _text(value, "a string")


def path(value: object) -> str:
    """A string, or a path as one."""
    return _text(fspath(value) if isinstance(value, PathLike) else value, "a string or a path")


def matching(pattern: re.Pattern[str], allowed: str) -> Rule:
    """A string that matches a pattern as a whole. allowed: what that is, in words."""

    def keep(value: object) -> str:
        if pattern.fullmatch(kept := _text(value, allowed)):
            return kept
        raise Refused(allowed)

    return keep


def texts(*, at_most: int, chars: int) -> Rule:
    """A sequence of at most so many strings, of 1 to `chars` characters each."""
    allowed = f"a sequence of at most {at_most} strings of 1 to {chars} characters"

    def keep(value: object) -> tuple[str, ...]:
        items = tuple(_text(item, allowed) for item in sequence(value, at_most, allowed))
        for item in items:
            if not 1 <= len(item) <= chars:
                raise Refused(allowed, f"one of {len(item)} characters")
        return items

    return keep


def text_or_texts(*, at_most: int, chars: int) -> Rule:
    """As `texts`, where one string may stand for a sequence of one."""
    rule = texts(at_most=at_most, chars=chars)

    def keep(value: object) -> Any:
        try:
            return rule((value,) if isinstance(value, str) else value)
        except Refused as refused:
            raise Refused(f"a string, or {refused.allowed}", refused.given) from None

    return keep


def integers(*, at_most: int, allowed: str = "") -> Rule:
    """A sequence of at most so many integers. allowed: that in other words."""
    allowed = allowed or f"a sequence of at most {at_most} integers"
    return lambda value: whole_numbers(sequence(value, at_most, allowed), allowed)


def series(allowed: str, *, at_most: int = MAX_INT) -> Rule:
    """A sequence of whatever. allowed: what that is, in words."""
    return lambda value: sequence(value, at_most, allowed)


def biases(*, at_most: int, largest: float) -> Rule:
    """A mapping of token ids to numbers, or such pairs, clamped to [-largest, largest]; of equal ids the last counts.

    A token id may be spelled in digits: JSON has no other keys.
    """
    allowed = f"a mapping of at most {at_most} token ids to finite numbers"

    def bias(value: object) -> float:
        number = _float(value, allowed)
        if math.isfinite(number):
            return min(max(number, -largest), largest)
        raise Refused(allowed, shown(value))

    def token_id(value: object) -> int:
        if isinstance(value, str) and _TOKEN_ID.fullmatch(value):
            return int(value)
        return _index(value, allowed)

    def keep(value: object) -> tuple[tuple[int, float], ...]:
        items = sequence(value.items() if isinstance(value, Mapping) else value, at_most, allowed)
        pairs = [sequence(item, 2, allowed) for item in items]
        if not all(len(pair) == 2 for pair in pairs):
            raise Refused(allowed)
        return tuple({token_id(key): bias(number) for key, number in pairs}.items())

    return keep


def instance(kind: type) -> Rule:
    """An object of a class."""

    def keep(value: object) -> object:
        if isinstance(value, kind):
            return value
        raise Refused(kind.__name__)

    return keep


def sequence(value: object, at_most: int, allowed: str) -> tuple[Any, ...]:
    """The items of a list or its like, counted before they are looked at. Raises `Refused`."""
    if type(value) is tuple and len(value) <= at_most:
        return value
    if isinstance(value, Sized) and isinstance(value, Iterable) and not isinstance(value, NO_SEQUENCES):
        try:
            num = len(value)
        except TypeError:  # an array of no dimensions has the method, and no length
            raise Refused(allowed, shown(value)) from None
        if num <= at_most:
            return tuple(value)
        raise Refused(allowed, f"{num} of them")
    raise Refused(allowed)


def whole_numbers(items: tuple[Any, ...], allowed: str) -> tuple[int, ...]:
    """The items as integers. Raises `Refused`."""
    return items if set(map(type, items)) <= {int} else tuple(_index(item, allowed) for item in items)


def shown(value: object) -> str:
    """A value as a message quotes it: short, whatever it is."""
    return _repr.repr(value)


def _index(value: object, allowed: str) -> int:
    """An integer of whatever kind, numpy's say, as an int."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool) and not _is_array_of_others(value):
        with suppress(TypeError):  # numpy's arrays have the method, and most refuse
            return index(value)
    raise Refused(allowed, shown(value))


def _is_array_of_others(value: object) -> bool:
    """Whether an array is of more dimensions than a number, or of truths: torch makes integers of both."""
    return bool(getattr(value, "ndim", 0)) or str(getattr(value, "dtype", "")).endswith("bool")


def _float(value: object, allowed: str) -> float:
    """A number of whatever kind as a float."""
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            return float(value)
    raise Refused(allowed, shown(value))


def _text(value: object, allowed: str) -> str:
    """The characters of a string, whose own __str__ may say something else: an Enum's member has its name there."""
    if isinstance(value, str):
        return value if type(value) is str else str.__str__(value)
    raise Refused(allowed, shown(value))


class _Repr(Repr):
    """Cuts what is long, and says of a huge integer how many bits it has: to spell it would take for ever."""

    def repr_int(self, x: int, level: int) -> str:
        del level
        return repr(x) if x.bit_length() < 100 else f"an integer of {x.bit_length()} bits"


_repr: Final = _Repr()
_repr.maxstring = _repr.maxother = 60

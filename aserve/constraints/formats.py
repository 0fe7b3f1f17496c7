"""Formats of strings: which are enforced, and those that are spelled out as patterns, so that no day is one too many.

llguidance lets 29 February stand in any year, second 60 in any minute, and a year 0, in which few programs have dates.
"""

from collections.abc import Mapping
from typing import Any, Final

from aserve.constraints.json_schema import (
    FREE_FORMATS,
    NAMED,
    ONE,
    SEVERAL,
    WHOLE_FORMATS,
    enforced_in,
    is_annotation,
    parts_of,
)
from aserve.constraints.kinds import with_any_of
from aserve.constraints.numbers import LOWER, UPPER, clipped, without_slips

_YEAR: Final = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURTH: Final = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR: Final = f"(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_MONTHS: Final = (
    "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])",
    "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)",
    "02-(?:0[1-9]|1[0-9]|2[0-8])",
)
_DATE: Final = f"(?:{_YEAR}-(?:{'|'.join(_MONTHS)})|{_LEAP_YEAR}-02-29)"
_CLOCK: Final = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_CLOCK})"
SPELLED_OUT: Final[Mapping[str, str]] = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}"}
"""As RFC 3339 has them, with at most six digits of a second."""


JOINING: Final = frozenset({"anyOf", "oneOf", "$ref"})
"""Keywords whose schemas are joined with what stands beside them."""
BESIDE: Final = frozenset({"$defs", "definitions", "$schema"})
"""Keywords with which nothing is joined."""


def with_patterns(schema: Any) -> Any:
    """A schema that was checked, with patterns in place of these formats, bounds that hold, and without annotations.

    llguidance would follow references from an $id, and into examples.
    """
    return with_any_of(_spelled(schema, is_joined=_is_joined(schema)))


def _is_joined(schema: Any) -> bool:
    """Whether a part of it may be joined with another."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, bool):
            continue
        enforced = enforced_in(part) - BESIDE
        if "allOf" in part or (len(enforced) > 1 and enforced & JOINING):
            return True
        parts.extend(inner for _, inner in parts_of("", part))
    return False


def _spelled(schema: Any, *, is_joined: bool) -> Any:
    if isinstance(schema, bool):
        return schema
    made = {
        keyword: _part(keyword, value, is_joined=is_joined)
        for keyword, value in schema.items()
        if not is_annotation(keyword)
    }
    format = made.get("format", "")
    pattern = SPELLED_OUT.get(format)
    if format in WHOLE_FORMATS:
        made |= _bounded(made, *WHOLE_FORMATS[format])
    if pattern is not None or format in WHOLE_FORMATS or format in FREE_FORMATS:
        del made["format"]
    if pattern is not None:
        made["allOf"] = [*made.get("allOf", ()), {"pattern": f"^{pattern}$"}]
        if "pattern" not in made and len(made["allOf"]) == 1:
            made.update(made.pop("allOf")[0])
    return without_slips(made, is_joined=is_joined)


def _bounded(made: Mapping[str, Any], least: int, greatest: int) -> dict[str, Any]:
    """What has to be added for numbers that are whole, and within bounds."""
    kind = {"type": "integer"} if made.get("type") == "number" else {}
    return {
        **kind,
        "minimum": max(made.get("minimum", least), least),
        "maximum": min(made.get("maximum", greatest), greatest),
    }


def _part(keyword: str, value: Any, *, is_joined: bool) -> Any:
    if keyword in LOWER | UPPER:
        return clipped(keyword, value)
    if keyword in ONE:
        return _spelled(value, is_joined=is_joined)
    if keyword in SEVERAL:
        return [_spelled(item, is_joined=is_joined) for item in value]
    if keyword in NAMED:
        return {name: _spelled(item, is_joined=is_joined) for name, item in value.items()}
    return value

"""Formats of strings: which are enforced, and those that are spelled out as patterns, so that no day is one too many.

llguidance lets 29 February stand in any year, second 60 in any minute, and a year 0, in which few programs have dates.
"""

from collections.abc import Mapping
from typing import Any, Final

from aserve.constraints.json_schema import ANNOTATIONS, NAMED, ONE, SEVERAL

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


def with_patterns(schema: Any) -> Any:
    """A schema that was checked, with patterns in place of these formats, and without annotations.

    llguidance would follow references from an $id, and into examples.
    """
    if isinstance(schema, bool):
        return schema
    made = {keyword: _part(keyword, value) for keyword, value in schema.items() if keyword not in ANNOTATIONS}
    pattern = SPELLED_OUT.get(made.get("format", ""))
    if pattern is not None:
        del made["format"]
        made["allOf"] = [*made.get("allOf", ()), {"pattern": f"^{pattern}$"}]
        if "pattern" not in made and len(made["allOf"]) == 1:
            made.update(made.pop("allOf")[0])
    return made


def _part(keyword: str, value: Any) -> Any:
    if keyword in ONE:
        return with_patterns(value)
    if keyword in SEVERAL:
        return [with_patterns(item) for item in value]
    if keyword in NAMED:
        return {name: with_patterns(item) for name, item in value.items()}
    return value

"""Dates and times that are spelled out as patterns: of each, Python's own are the judge."""

import datetime
import random
import re
from contextlib import suppress

import pytest

from aserve.constraints.formats import SPELLED_OUT, with_patterns


def is_date(text: str) -> bool:
    with suppress(ValueError):
        datetime.date.fromisoformat(text)
        return True
    return False


def is_time(text: str) -> bool:
    with suppress(ValueError):
        return datetime.time.fromisoformat(text).tzinfo is not None
    return False


def test_every_day_of_years_of_each_kind_is_a_date_and_no_other_is():
    for year in (0, 1, 4, 100, 400, 1900, 2000, 2023, 2024, 2100, 9999):
        for month in range(14):
            for day in range(33):
                text = f"{year:04}-{month:02}-{day:02}"
                assert bool(re.fullmatch(SPELLED_OUT["date"], text)) == is_date(text), text


def test_times_are_those_of_a_clock():
    rng = random.Random(0)
    for _ in range(3000):
        hour, minute, second = rng.randrange(26), rng.randrange(62), rng.randrange(62)
        fraction = rng.choice(["", ".5", ".123456"])
        offset = rng.choice(["Z", "+00:00", "-23:59", "+05:30"])
        text = f"{hour:02}:{minute:02}:{second:02}{fraction}{offset}"
        assert bool(re.fullmatch(SPELLED_OUT["time"], text)) == is_time(text), text
    assert not re.fullmatch(SPELLED_OUT["time"], "12:00:00")
    assert not re.fullmatch(SPELLED_OUT["time"], "12:00:00+24:00")


@pytest.mark.parametrize(
    ("schema", "changed"),
    [
        (True, True),
        ({"format": "uuid"}, {"format": "uuid"}),
        ({"format": "date"}, {"pattern": f"^{SPELLED_OUT['date']}$"}),
        (
            {"format": "date", "pattern": "^2"},
            {"pattern": "^2", "allOf": [{"pattern": f"^{SPELLED_OUT['date']}$"}]},
        ),
        (
            {"properties": {"format": {"items": {"format": "time"}}}, "default": {"format": "date"}},
            {"properties": {"format": {"items": {"pattern": f"^{SPELLED_OUT['time']}$"}}}},
        ),
        ({"format": "password", "x-shown": False, "example": "a"}, {}),
        ({"type": "number", "format": "double", "minimum": 1}, {"type": "number", "minimum": 1}),
        ({"type": "integer", "format": "int32"}, {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}),
        (
            {"type": "number", "format": "uint64", "minimum": 3, "maximum": 9},
            {"type": "integer", "minimum": 3, "maximum": 9},
        ),
        ({"properties": {"x-a": {"x-b": 1}}}, {"properties": {"x-a": {}}}),
        ({"anyOf": [{"format": "date"}, False]}, {"anyOf": [{"pattern": f"^{SPELLED_OUT['date']}$"}, False]}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_formats_become_patterns_where_they_are_keywords(schema, changed):
    assert with_patterns(schema) == changed

"""Reports travel as builtins, and what is no report says which field."""

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.routing import ReplicaLoad, ReplicaReport

REPORT = ReplicaReport(taken_at=5.0, waiting_tokens=7, tokens_per_s=3.5, adapters=("a",), digest=b"\1\2\3\4")


def test_a_report_becomes_builtins_and_comes_back():
    told = REPORT.to_dict()
    assert {type(value) for value in told.values()} <= {int, float, list, bytes}
    assert ReplicaReport.from_dict(pickle.loads(pickle.dumps(told))) == REPORT
    assert ReplicaReport.from_dict({"taken_at": 1, "of another version": 2}) == ReplicaReport(taken_at=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("taken_at", -1), ("waiting_tokens", "3"), ("tokens_per_s", 0.0), ("digest", [1]), ("num_requests", 1e300)],
)
def test_what_is_no_report_says_which_field(field: str, value: Any):
    with pytest.raises(ValueError, match=field):
        ReplicaReport.from_dict({**REPORT.to_dict(), field: value})


def test_a_report_needs_its_time():
    with pytest.raises(ValueError, match="taken_at"):
        ReplicaReport.from_dict({})


@given(st.dictionaries(st.sampled_from(ReplicaLoad.__struct_fields__), st.floats() | st.none() | st.text(max_size=2)))
def test_loads_are_numbers_and_any_numbers_are_a_load(stats: dict[str, Any]):
    load = ReplicaLoad.from_stats(stats)
    assert ReplicaLoad.from_stats(load.to_stats()) == load


def test_what_a_load_does_not_tell_is_nothing():
    assert set(ReplicaLoad.from_stats({}).to_stats().values()) == {0.0}
    assert ReplicaLoad.from_stats({}).tokens_per_s is None


def test_the_load_is_part_of_the_report():
    assert REPORT.load() == ReplicaLoad(waiting_tokens=7, tokens_per_s=3.5)
    assert REPORT.load().to_stats()["tokens_per_s"] == 3.5

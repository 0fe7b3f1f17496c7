"""Buckets are those of Prometheus: cumulative, with inclusive upper bounds, and one without."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from aserve.metrics.histogram import BucketCounts

BOUNDS = (0.5, 1.0, 2.5)


def samples(family):
    return {(sample.name, sample.labels.get("le")): sample.value for sample in family.samples}


def test_observations_fall_into_their_buckets():
    counts = BucketCounts(BOUNDS)
    for value in (0.1, 0.5, 0.6, 99.0):
        counts.observe(value)
    counts.observe(2.0, times=3)
    assert samples(counts.family("a", "b", {"model_name": "m"})) == {
        ("a_bucket", "0.5"): 2,
        ("a_bucket", "1.0"): 3,
        ("a_bucket", "2.5"): 6,
        ("a_bucket", "+Inf"): 7,
        ("a_count", None): 7,
        ("a_sum", None): 0.1 + 0.5 + 0.6 + 99.0 + 6.0,
    }


@given(st.lists(st.floats(0, 10)))
def test_it_agrees_with_prometheus_own(values):
    counts = BucketCounts(BOUNDS)
    twin = Histogram("a", "b", ["model_name"], buckets=BOUNDS, registry=CollectorRegistry()).labels("m")
    for value in values:
        counts.observe(value)
        twin.observe(value)
    expected = {("a" + sample.name, (sample.labels or {}).get("le")): sample.value for sample in twin._child_samples()}
    expected.pop(("a_created", None))
    assert samples(counts.family("a", "b", {"model_name": "m"})) == expected

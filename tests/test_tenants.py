"""Accounts: limits by the minute and at once, what is counted, and what a change of the limits leaves as it is."""

from contextlib import suppress

import pytest

from aserve.core.errors import RateLimitError
from aserve.tenants import Account, Bucket, Limits, Tenant, Tenants, Usage
from tests.fakes import FakeClock


def account(now: float = 0.0, **limits: int) -> Account:
    return Account(Tenant(name="a", limits=Limits(**limits)), now)


def test_a_minutes_requests_are_taken_at_once_and_come_back_evenly():
    one = account(requests_per_minute=3)
    for _ in range(3):
        one.enter(0.0)
    with pytest.raises(RateLimitError, match="3 requests a minute") as caught:
        one.enter(0.0)
    assert caught.value.retry_after_s == 20
    with pytest.raises(RateLimitError):
        one.enter(19.9)
    one.enter(20.0)
    assert one.usage().num_refused == 2


def test_tokens_may_be_overdrawn_and_are_waited_for():
    one = account(tokens_per_minute=600)
    one.enter(0.0)
    one.opened(1000, 0.0)
    with pytest.raises(RateLimitError, match="600 tokens") as caught:
        one.enter(0.0)
    assert caught.value.retry_after_s == 41  # 401 of them are missing, at ten a second
    one.closed(1000, 200, 100, 41.0)
    with pytest.raises(RateLimitError):
        one.enter(50.0)
    one.enter(51.0)


def test_over_an_hour_no_more_is_used_than_is_allowed():
    one, used = account(tokens_per_minute=600), 0
    for second in range(3600):
        try:
            one.enter(float(second))
        except RateLimitError:
            continue
        one.opened(50, float(second))
        one.closed(50, 0, 250, float(second))
        one.leave()
        used += 300
    assert 60 * 600 <= used <= 61 * 600 + 300


def test_as_many_at_once_as_there_may_be_until_one_has_left():
    one = account(requests_at_once=2)
    one.enter(0.0)
    one.enter(0.0)
    with pytest.raises(RateLimitError, match="2 requests of this key are open") as caught:
        one.enter(0.0)
    assert caught.value.retry_after_s == 1
    one.leave()
    one.enter(0.0)


def test_who_is_refused_is_charged_nothing():
    one = account(requests_per_minute=9, requests_at_once=1)
    one.enter(0.0)
    for _ in range(20):
        with pytest.raises(RateLimitError):
            one.enter(0.0)
    assert one.allowances(0.0)["requests"].remaining == 8


def test_what_is_left_is_told_with_the_time_until_all_is_back():
    bucket = Bucket(60, 0.0)
    bucket.take(15, 0.0)
    assert (bucket.allowance(0.0).remaining, bucket.allowance(0.0).reset_s) == (45, 15.0)
    assert (bucket.allowance(5.0).remaining, bucket.allowance(5.0).reset_s) == (50, 10.0)
    assert (bucket.allowance(99.0).remaining, bucket.allowance(99.0).reset_s) == (60, 0.0)


def test_counts_are_of_requests_that_were_answered():
    one = account()
    for generated in (7, 0):
        one.enter(0.0)
        one.opened(20, 0.0)
        one.closed(20, 16, generated, 1.0)
    one.leave()
    assert one.usage() == Usage(
        tenant="a",
        num_open=1,
        num_requests=2,
        num_prompt_tokens=20,
        num_cached_tokens=16,
        num_generated_tokens=7,
    )


def test_new_limits_hold_at_once_and_what_was_used_stays_used():
    tenants = Tenants(FakeClock())
    tenants.declare([Tenant(name="a", weight=2.0, limits=Limits(requests_per_minute=2))])
    for _ in range(2):
        tenants.account("a").enter(0.0)
    tenants.declare([Tenant(name="a", limits=Limits(requests_per_minute=3)), Tenant(name="b")])
    assert tenants.allowances("a")["requests"].remaining == 1
    tenants.account("a").enter(0.0)
    with pytest.raises(RateLimitError):
        tenants.account("a").enter(0.0)
    tenants.declare([])
    assert tenants.account("a").tenant == Tenant(name="a")
    tenants.account("a").enter(0.0)
    assert [(usage.tenant, usage.num_requests) for usage in tenants.usages()] == [("a", 4), ("b", 0)]


def test_a_request_is_open_until_it_has_been_answered_however_that_ends():
    tenants = Tenants(FakeClock())
    with suppress(ZeroDivisionError), tenants.entered("a"):
        assert tenants.account("a").usage().num_open == 1
        raise ZeroDivisionError
    assert tenants.account("a").usage().num_open == 0


def test_lines_of_batches_take_no_places_of_requests():
    """Caught: a batch that locks out its tenant's requests."""
    one = account(requests_at_once=1, requests_per_minute=1)
    for _ in range(3):
        assert one.has_room_for_line(0.0)
        one.line_entered()
    one.enter(0.0)
    with pytest.raises(RateLimitError):
        one.enter(0.0)
    one.line_left()
    assert one.usage() == Usage(tenant="a", num_open=3, num_requests=4, num_refused=1)


def test_lines_leave_half_of_the_tokens():
    """Catches lines that begin all at once, and together use up what they have been left one by one."""
    one = account(tokens_per_minute=600)
    one.line_entered()
    assert not one.has_room_for_line(0.0), "nobody knows what it will need"
    one.opened(50, 0.0)
    one.closed(50, 0, 50, 0.0)
    assert one.has_room_for_line(0.0)
    one.line_entered()
    assert one.has_room_for_line(0.0), "500 are left: room for two of a hundred"
    one.line_entered()
    assert not one.has_room_for_line(0.0)
    for _ in range(3):
        one.line_left()
    one.opened(201, 0.0)
    assert not one.has_room_for_line(0.0)
    assert one.has_room_for_line(0.1)
    one.enter(0.0)

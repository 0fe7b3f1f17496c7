"""Tenants: on whose account requests run, what each may use and has used. By name: keys are known to http alone.

A tenant that nobody declared is taken as it comes, with weight 1 and without limits: "" is everybody who is not told
apart, and a program that embeds an engine may name whom it likes.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import ceil
from typing import Final

import msgspec

from aserve.core.errors import RateLimitError
from aserve.core.ports import Clock

MINUTE_S: Final = 60.0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant may use; None is without limit. requests_at_once: that are open, waiting or being answered.

    Those of requests are not for lines of batches, which go behind everybody; that of tokens is for both.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    requests_at_once: int | None = None


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """weight: its share, under the fair policy. isolate_cache: it shares cached prefixes with nobody."""

    name: str = ""
    weight: float = 1.0
    limits: Limits = Limits()
    isolate_cache: bool = False


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant has used since the start. num_open: requests now. num_refused: for its limits.

    num_prompt_tokens, num_cached_tokens, num_generated_tokens: of requests that began to answer.
    Lines of batches are requests, too, and are never refused.
    """

    tenant: str
    num_open: int = 0
    num_requests: int = 0
    num_refused: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0


class Allowance(msgspec.Struct, frozen=True):
    """What is left of a minute's. reset_s: until all of it is there again."""

    limit: int
    remaining: int
    reset_s: float


class Bucket:
    """What may be used in a minute. It fills evenly, and may be overdrawn, which is waited for."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now

    def wait_s(self, now: float) -> float:
        """How long until there is one to take."""
        return max(0.0, (1.0 - self._fill(now)) * MINUTE_S / self.per_minute)

    def take(self, count: int, now: float) -> None:
        """Use so many, whether they are there or not."""
        self._level = self._fill(now) - count

    def resize(self, per_minute: int, now: float) -> None:
        """From now on so many may be used; what has been used stays used."""
        self._level = self._fill(now) + per_minute - self.per_minute
        self.per_minute = per_minute

    def spare(self, now: float) -> float:
        """What is there beyond half of a minute's; below 0 where less than half of it is there."""
        return self._fill(now) - self.per_minute / 2

    def allowance(self, now: float) -> Allowance:
        """What is left."""
        level = self._fill(now)
        return Allowance(self.per_minute, max(0, int(level)), (self.per_minute - level) * MINUTE_S / self.per_minute)

    def _fill(self, now: float) -> float:
        self._level = min(float(self.per_minute), self._level + (now - self._at_s) * self.per_minute / MINUTE_S)
        self._at_s = now
        return self._level


class Account:
    """One tenant's: its limits with what is left of them, and its counts. Times are seconds of one clock."""

    def __init__(self, tenant: Tenant, now: float) -> None:
        self._num_open = 0
        self._num_lines = 0
        self._num_requests = 0
        self._num_refused = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_generated_tokens = 0
        self._num_charged = 0
        self._num_charged_tokens = 0
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.declare(tenant, now)

    def declare(self, tenant: Tenant, now: float) -> None:
        """What it may from now on; what it has used stays used."""
        self.tenant = tenant
        self._requests = _resized(self._requests, tenant.limits.requests_per_minute, now)
        self._tokens = _resized(self._tokens, tenant.limits.tokens_per_minute, now)

    def enter(self, now: float) -> None:
        """One more request. Raises `RateLimitError` if it may not be."""
        limit = self.tenant.limits.requests_at_once
        if limit is not None and self._num_open >= limit:
            self._refuse(f"{self._num_open} requests of this key are open, which is the most there may be", 1.0)
        for bucket, what in ((self._requests, "requests"), (self._tokens, "tokens")):
            if bucket is not None and (wait_s := bucket.wait_s(now)) > 0.0:
                self._refuse(f"this key may use {bucket.per_minute} {what} a minute, and has used them", wait_s)
        if self._requests is not None:
            self._requests.take(1, now)
        self._num_open += 1
        self._num_requests += 1

    def _refuse(self, message: str, wait_s: float) -> None:
        self._num_refused += 1
        raise RateLimitError(message, max(1, ceil(wait_s)))

    def stay(self) -> None:
        """A request that was let in goes on when it has been answered: it is open until it leaves once more."""
        self._num_open += 1

    def leave(self) -> None:
        """A request that was let in has been answered, or given up."""
        self._num_open -= 1

    def has_room_for_line(self, now: float) -> bool:
        """Whether one more line of a batch leaves half of a minute's tokens to requests, as far as can be told.

        Each line that runs is taken to need what the tenant's have come to on average; the very first runs alone.
        """
        if self._tokens is None:
            return True
        if self._num_charged == 0 and self._num_lines:
            return False
        usual = self._num_charged_tokens / max(1, self._num_charged)
        return self._tokens.spare(now) >= self._num_lines * usual

    def line_entered(self) -> None:
        """A line of a batch begins. Requests have their places beside it."""
        self._num_lines += 1
        self._num_requests += 1

    def line_left(self) -> None:
        """It was answered, or given up."""
        self._num_lines -= 1

    def opened(self, num_prompt_tokens: int, now: float) -> None:
        """A prompt is to be computed."""
        if self._tokens is not None:
            self._tokens.take(num_prompt_tokens, now)

    def closed(self, num_prompt_tokens: int, num_cached_tokens: int, num_generated_tokens: int, now: float) -> None:
        """It was computed, and so many tokens were generated."""
        self._num_charged += 1
        self._num_charged_tokens += num_prompt_tokens + num_generated_tokens
        if self._tokens is not None:
            self._tokens.take(num_generated_tokens, now)
        if num_generated_tokens:
            self._num_prompt_tokens += num_prompt_tokens
            self._num_cached_tokens += num_cached_tokens
            self._num_generated_tokens += num_generated_tokens

    def usage(self) -> Usage:
        """The counts."""
        return Usage(
            tenant=self.tenant.name,
            num_open=self._num_open + self._num_lines,
            num_requests=self._num_requests,
            num_refused=self._num_refused,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens,
        )

    def allowances(self, now: float) -> dict[str, Allowance]:
        """What is left, of "requests" and of "tokens", where they are limited."""
        buckets = {"requests": self._requests, "tokens": self._tokens}
        return {name: bucket.allowance(now) for name, bucket in buckets.items() if bucket is not None}


def _resized(bucket: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute, now)
    bucket.resize(per_minute, now)
    return bucket


class Tenants:
    """The accounts of one engine."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._accounts: dict[str, Account] = {}

    def declare(self, tenants: Iterable[Tenant]) -> None:
        """Who there is from now on. Who is not declared any more keeps its counts, and loses weight and limits."""
        now = self._clock()
        declared = {tenant.name: tenant for tenant in tenants}
        for name in declared.keys() | self._accounts.keys():
            tenant = declared.get(name, Tenant(name=name))
            if name in self._accounts:
                self._accounts[name].declare(tenant, now)
            else:
                self._accounts[name] = Account(tenant, now)

    def account(self, name: str) -> Account:
        """A tenant's, made when it is first asked for."""
        if name not in self._accounts:
            self._accounts[name] = Account(Tenant(name=name), self._clock())
        return self._accounts[name]

    @contextmanager
    def entered(self, name: str) -> Iterator[None]:
        """While a request of that tenant is answered. Raises as `Account.enter`."""
        account = self.account(name)
        account.enter(self._clock())
        try:
            yield
        finally:
            account.leave()

    @contextmanager
    def staying(self, name: str) -> Iterator[None]:
        """While a request of that tenant goes on that has been answered."""
        account = self.account(name)
        account.stay()
        try:
            yield
        finally:
            account.leave()

    @contextmanager
    def answering_line(self, name: str) -> Iterator[None]:
        """While a line of a batch of that tenant is answered, which nobody is refused for."""
        account = self.account(name)
        account.line_entered()
        try:
            yield
        finally:
            account.line_left()

    def has_room_for_line(self, name: str) -> bool:
        """Whether a line of a batch of that tenant may begin; see `Account`."""
        return self.account(name).has_room_for_line(self._clock())

    def turned_away(self, name: str) -> None:
        """A request of that tenant came, and went at once: counted as by `entered`, and raises as that."""
        account = self.account(name)
        account.enter(self._clock())
        account.leave()

    def allowances(self, name: str) -> dict[str, Allowance]:
        """What a tenant has left; see `Account`."""
        return self.account(name).allowances(self._clock())

    def usages(self) -> list[Usage]:
        """Of all tenants, by name."""
        return [self._accounts[name].usage() for name in sorted(self._accounts)]

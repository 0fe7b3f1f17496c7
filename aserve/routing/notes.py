"""Notes: what a router itself has sent to one replica, which the replica's last report cannot know yet. Bounded.

    backlog    tokens that wait there: as reported, less what it has computed since, and what was sent to it since
    keys       beginnings of prompts that were sent there: held, until a report that was made later says otherwise

A note on a key lasts while its request is open, and from its end until a report made after it. Where the replica's
reports have no digest, notes are all that is known of its cache, and only the bound ends them.
"""

from collections import OrderedDict
from typing import Final

import msgspec

from aserve.routing.digest import Digest, num_leading
from aserve.routing.keys import PromptKeys
from aserve.routing.report import ReplicaReport

MAX_KEYS: Final = 8192
"""Noted of a replica: under a megabyte."""
MAX_SENT: Final = 4096
"""Prompts that are remembered until a report has them."""
LONGEST_OPEN_S: Final = 600.0
"""A request of whose end nobody told is taken to be over."""
TRANSIT_S: Final = 0.1
"""What was sent so shortly before a report was made may not have been in it: clocks differ, and requests travel."""


class Prompt(msgspec.Struct, frozen=True):
    """What was sent. num_new: of its tokens, those to be computed.

    weight: how many times that counts, since other routers send to the replica, too.
    """

    keys: PromptKeys
    num_tokens: int
    num_new: float
    weight: float


class Notes:
    """On one replica. Times are Unix seconds of the router's clock.

    report: the last; None before there was one. num_open: requests sent there that have not ended, and those that
    others had open when it reported.
    """

    def __init__(self) -> None:
        self.report: ReplicaReport | None = None
        self.num_sent_tokens = 0
        """Of prompts, since the last report."""
        self._digest: Digest | None = None
        self._keys: dict[int, float] = {}
        """By when each came to be true for good, or will have: the time from which on a report knows better."""
        self._backlog = self._backlog_at = 0.0
        self._sent: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._num_reported = 0
        self._num_since = 0

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def num_open(self) -> int:
        """Requests that are open there, as far as is known."""
        return max(0, self._num_reported + self._num_since)

    def backlog(self, now: float, tokens_per_s: float) -> float:
        """Tokens that wait there."""
        return max(0.0, self._backlog - max(0.0, now - self._backlog_at) * tokens_per_s)

    def num_held(self, keys: PromptKeys) -> int:
        """How many of the keys it holds, from the shortest on."""
        digest, noted = self._digest, self._keys
        if digest is None:
            return num_leading(keys.hashes, noted.__contains__)
        reported = digest.__contains__
        return num_leading(keys.hashes, lambda key: key in noted or reported(key))

    def reported(self, report: ReplicaReport, now: float, weight: float, tokens_per_s: float) -> bool:
        """The replica tells how it is; whether that is news. weight: see `Prompt`."""
        if self.report is not None and report.taken_at <= self.report.taken_at:
            return False
        taken_at = min(report.taken_at, now)
        self.report = report
        while self._sent and next(iter(self._sent.values()))[0] < taken_at - TRANSIT_S:
            self._sent.popitem(last=False)
        since = sum(tokens for _, tokens in self._sent.values()) * weight
        drained = (now - taken_at) * tokens_per_s
        self._backlog, self._backlog_at = max(0.0, report.waiting_tokens + since - drained), now
        self._num_reported, self._num_since, self.num_sent_tokens = report.num_requests, len(self._sent), 0
        if report.digest is not None:
            self._digest = Digest(report.digest)
            self._keys = {key: until for key, until in self._keys.items() if until >= taken_at - TRANSIT_S}
        return True

    def sent(self, name: str, prompt: Prompt, now: float, speed: float) -> None:
        """A request of this name was sent there. speed: the replica's tokens a second."""
        self._backlog, self._backlog_at = self.backlog(now, speed) + prompt.num_new * prompt.weight, now
        self._sent[name] = now, prompt.num_new
        if len(self._sent) > MAX_SENT:
            self._sent.popitem(last=False)
        self._num_since += 1
        self.num_sent_tokens += prompt.num_tokens
        self._note(prompt.keys, now + LONGEST_OPEN_S)

    def taken_back(self, name: str, prompt: Prompt) -> None:
        """The request went elsewhere after all. Its keys stay: a report will know."""
        if self._sent.pop(name, None) is not None:
            self._backlog = max(0.0, self._backlog - prompt.num_new * prompt.weight)
            self.num_sent_tokens = max(0, self.num_sent_tokens - prompt.num_tokens)
        self._num_since -= 1

    def ended(self, keys: PromptKeys, now: float) -> None:
        """A request is over, and what it computed is there, if it ever will be."""
        self._num_since -= 1
        self._note(keys, now)

    def _note(self, keys: PromptKeys, until: float) -> None:
        for key in reversed(keys.hashes):
            self._keys.pop(key, None)
            self._keys[key] = until
        while len(self._keys) > MAX_KEYS:
            del self._keys[next(iter(self._keys))]

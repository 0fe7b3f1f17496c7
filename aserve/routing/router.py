"""Router: to which replica a request is sent, by when each would have its first token.

    seconds(replica) = (tokens that wait there + tokens of the prompt that it does not hold) / its tokens per second
                     + what the tokens that it does not hold cost everybody else
                     + the time to load an adapter that it has not, less a little where the session was before

The least is chosen, at random among those that are nearly as good. So a prefix draws requests to where it is held until
the queue there costs more than computing it again, which gives a second replica a copy. Where nothing tells replicas
apart but their load, it is the less loaded of two drawn at random (M. Mitzenmacher, The power of two choices in
randomized load balancing, 1996).

Reports are seconds old when they come, so a router counts what it has sent since. Other routers send, too: of the
tokens that arrive at the replicas one router sees its share in the reports, and counts its own for as many as that.

One router is used by one event loop: calls are atomic. It is deterministic, given its seed and what it is told.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from random import Random
from typing import Final

import msgspec

from aserve.routing.keys import NO_KEYS, PromptKeys
from aserve.routing.notes import LONGEST_OPEN_S, Notes, Prompt
from aserve.routing.report import BYTES_PER_TOKEN, ReplicaReport

MAX_SHARE: Final = 64.0
MAX_REPLICAS: Final = 1024
"""That are remembered, whoever they are."""
MAX_PROMPT_TOKENS: Final = 2**31
_SHARE_DECAY: Final = 0.9


class RouterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """saved_weight: what a token that need not be computed is worth to others, as a share of what it is to its request.

    adapter_load_s: to load an adapter where it is not loaded. sticky_s: that a session's replica may be worse by.
    near_s: replicas whose times differ by no more are as good as each other.
    tokens_per_request: that an open request counts for besides its prompt: its answer shares the replica's steps.
    tokens_per_s: of a replica that has not measured any, while no other has.
    max_open, max_sessions, max_adapters: that are remembered, the newest.

    Raises ValueError, naming the field.
    """

    saved_weight: float = 2.0
    adapter_load_s: float = 0.5
    sticky_s: float = 0.5
    near_s: float = 0.005
    tokens_per_request: float = 16.0
    tokens_per_s: float = 2000.0
    max_open: int = 16_384
    max_sessions: int = 16_384
    max_adapters: int = 256

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value, least = getattr(self, name), 1 if name.startswith("max_") or name == "tokens_per_s" else 0
            if not least <= value < float("inf"):
                raise ValueError(f"{name} must be a number of at least {least}, got {value!r}")


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A request, as a router sees it. id: one of its own. session, adapter: "" for none.

    num_tokens: of the prompt; None where they were not counted.
    """

    id: str
    keys: PromptKeys = NO_KEYS
    session: str = ""
    adapter: str = ""
    num_tokens: int | None = None


class Reason(StrEnum):
    """What made the choice: what the replica holds of the prompt, who it has served, what it has loaded, its load."""

    PREFIX = "prefix"
    SESSION = "session"
    ADAPTER = "adapter"
    LOAD = "load"


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """ranked: all candidates, the best first. Of that one: expected_s, to the first token; cached_tokens, it holds."""

    ranked: tuple[str, ...]
    reason: Reason
    expected_s: float
    cached_tokens: int


class RouterStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """num_chosen: by reason, since the start. num_open, num_sessions, num_keys: remembered now.

    others: how many times what this router sends the replicas get, all routers together.
    """

    num_chosen: Mapping[str, int]
    num_open: int
    num_sessions: int
    num_keys: int
    others: float


class _Sent(msgspec.Struct, frozen=True):
    """Where a request went, and when."""

    replica_id: str
    prompt: Prompt
    at: float


class _Offer(msgspec.Struct, frozen=True):
    """What a replica would be for a request. speed: its tokens a second. cost_s: what is compared."""

    replica_id: str
    speed: float
    cost_s: float
    expected_s: float
    num_cached: int
    num_new: float


_NOTHING: Final = Notes()
"""What is known of a replica of which nobody has heard."""


class Router:
    """Of one model's replicas, which are known by their ids."""

    def __init__(self, options: RouterOptions | None = None, seed: int = 0) -> None:
        self._options = options or RouterOptions()
        self._random = Random(seed)
        self._replicas: dict[str, Notes] = {}
        self._open: OrderedDict[str, _Sent] = OrderedDict()
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._adapters: OrderedDict[tuple[str, str], float] = OrderedDict()
        """Adapters that requests took to a replica, and when."""
        self._num_chosen: Counter[str] = Counter()
        self._arrived_tokens = self._own_tokens = 0.0

    # What it is told.

    def reported(self, replica_id: str, report: ReplicaReport, now: float) -> None:
        """A replica's report came. One that is no newer than the last is ignored."""
        notes = self._known(replica_id)
        before, num_own = notes.report, notes.num_sent_tokens
        speed = report.tokens_per_s or self._usual_speed()
        if not notes.reported(report, now, self._weight, speed) or before is None:
            return
        num_arrived = report.num_arrived_tokens - before.num_arrived_tokens
        if num_arrived >= 0:  # else it has started anew
            decay = _SHARE_DECAY ** (1 / len(self._replicas))
            self._arrived_tokens = self._arrived_tokens * decay + num_arrived
            self._own_tokens = self._own_tokens * decay + num_own

    def keep_only(self, replica_ids: Iterable[str]) -> None:
        """These replicas exist. Forget the others, and what was sent to them."""
        kept = set(replica_ids)
        self._replicas = {name: notes for name, notes in self._replicas.items() if name in kept}
        self._sessions = OrderedDict((name, place) for name, place in self._sessions.items() if place in kept)
        self._adapters = OrderedDict((pair, at) for pair, at in self._adapters.items() if pair[1] in kept)
        self._open = OrderedDict((name, sent) for name, sent in self._open.items() if sent.replica_id in kept)

    def routed(self, replica_id: str, ask: Ask, now: float) -> None:
        """The request went there; told where `choose` may not have had the last word."""
        sent = self._open.get(ask.id)
        if sent is None or sent.replica_id != replica_id:
            self._note(self._offer(replica_id, ask, now, self._usual_speed()), ask, now)

    def completed(self, ask_id: str, now: float) -> None:
        """The request of this id is over, however it ended. Ids that are not open are ignored."""
        sent = self._open.pop(ask_id, None)
        if sent is not None and (notes := self._replicas.get(sent.replica_id)) is not None:
            notes.ended(sent.prompt.keys, now)

    # What it is asked.

    def choose(self, candidates: Sequence[str], ask: Ask, now: float) -> Choice:
        """Rank the candidates, and note that the request goes to the first. Raises ValueError if there are none.

        Asked again for the same id, the last choice counts. Cost: some microseconds a candidate.
        """
        if not candidates:
            raise ValueError("candidates must be at least one replica's id, got none")
        usual_speed = self._usual_speed()
        offers = [self._offer(name, ask, now, usual_speed) for name in dict.fromkeys(candidates)]
        if self._are_alike(offers, ask) and len(offers) > 2:
            first = min(self._random.sample(offers, 2), key=lambda offer: offer.cost_s)
        else:
            first = self._least(offers)
        reason = self._reason(first, offers, ask)
        self._num_chosen[reason] += 1
        self._note(first, ask, now)
        rest = sorted((offer for offer in offers if offer is not first), key=lambda offer: offer.cost_s)
        ranked = (first.replica_id, *(offer.replica_id for offer in rest))
        return Choice(ranked=ranked, reason=reason, expected_s=first.expected_s, cached_tokens=first.num_cached)

    def statistics(self) -> RouterStatistics:
        """A snapshot."""
        return RouterStatistics(
            num_chosen=dict(self._num_chosen),
            num_open=len(self._open),
            num_sessions=len(self._sessions),
            num_keys=sum(map(len, self._replicas.values())),
            others=self._weight,
        )

    # How.

    def _known(self, replica_id: str) -> Notes:
        """The notes on a replica, which begin where there were none."""
        if (notes := self._replicas.get(replica_id)) is None:
            notes = self._replicas[replica_id] = Notes()
            if len(self._replicas) > MAX_REPLICAS:
                del self._replicas[next(iter(self._replicas))]
        return notes

    def _offer(self, replica_id: str, ask: Ask, now: float, usual_speed: float) -> _Offer:
        options, keys, notes = self._options, ask.keys, self._replicas.get(replica_id, _NOTHING)
        report = notes.report
        speed = report.tokens_per_s if report and report.tokens_per_s else usual_speed
        per_token = keys.bytes_per_token or (report.bytes_per_token if report else BYTES_PER_TOKEN)
        num_tokens = keys.num_bytes / per_token
        if ask.num_tokens is not None:
            num_tokens = min(max(0, ask.num_tokens), MAX_PROMPT_TOKENS)
        num_cached = min(keys.end(notes.num_held(keys)) / per_token, num_tokens)
        num_new = num_tokens - num_cached
        load_s = options.adapter_load_s if ask.adapter and not self._has_adapter(ask.adapter, replica_id) else 0.0
        expected_s = (notes.backlog(now, speed) + num_new) / speed + load_s
        cost_s = expected_s + (num_new * options.saved_weight + notes.num_open * options.tokens_per_request) / speed
        if ask.session and self._sessions.get(ask.session) == replica_id:
            cost_s -= options.sticky_s
        return _Offer(replica_id, speed, cost_s, expected_s, round(num_cached), num_new)

    def _are_alike(self, offers: Sequence[_Offer], ask: Ask) -> bool:
        """Whether nothing tells the candidates apart but their load."""
        return (
            len({offer.num_cached for offer in offers}) == 1
            and not any(self._sessions.get(ask.session) == offer.replica_id for offer in offers if ask.session)
            and not any(self._has_adapter(ask.adapter, offer.replica_id) for offer in offers if ask.adapter)
        )

    def _reason(self, first: _Offer, offers: Sequence[_Offer], ask: Ask) -> Reason:
        """What speaks for it."""
        if first.num_cached > min(offer.num_cached for offer in offers):
            return Reason.PREFIX
        if ask.session and self._sessions.get(ask.session) == first.replica_id:
            return Reason.SESSION
        if ask.adapter and self._has_adapter(ask.adapter, first.replica_id):
            return Reason.ADAPTER
        return Reason.LOAD

    def _least(self, offers: Sequence[_Offer]) -> _Offer:
        bound = min(offer.cost_s for offer in offers) + self._options.near_s
        return self._random.choice([offer for offer in offers if offer.cost_s <= bound])

    def _note(self, offer: _Offer, ask: Ask, now: float) -> None:
        """The request goes there, and not where it was noted before."""
        if (before := self._open.pop(ask.id, None)) is not None and (old := self._replicas.get(before.replica_id)):
            old.taken_back(ask.id, before.prompt)
        prompt = Prompt(ask.keys, round(offer.num_new) + offer.num_cached, offer.num_new, self._weight)
        self._known(offer.replica_id).sent(ask.id, prompt, now, offer.speed)
        self._open[ask.id] = _Sent(offer.replica_id, prompt, now)
        while len(self._open) > self._options.max_open or next(iter(self._open.values())).at < now - LONGEST_OPEN_S:
            self.completed(next(iter(self._open)), now)
        if ask.session:
            self._sessions[ask.session] = offer.replica_id
            self._sessions.move_to_end(ask.session)
            if len(self._sessions) > self._options.max_sessions:
                self._sessions.popitem(last=False)
        if ask.adapter:
            self._adapters[ask.adapter, offer.replica_id] = now
            self._adapters.move_to_end((ask.adapter, offer.replica_id))
            if len(self._adapters) > self._options.max_adapters:
                self._adapters.popitem(last=False)

    def _has_adapter(self, adapter: str, replica_id: str) -> bool:
        """As its report says, or as it will once a request that was sent since has come."""
        report = self._replicas.get(replica_id, _NOTHING).report
        sent_at = self._adapters.get((adapter, replica_id))
        if report is None or (sent_at is not None and sent_at >= report.taken_at):
            return sent_at is not None
        return adapter in report.adapters

    @property
    def _weight(self) -> float:
        """How many times what this router sends the replicas get."""
        return min(max(self._arrived_tokens / self._own_tokens, 1.0), MAX_SHARE) if self._own_tokens else 1.0

    def _usual_speed(self) -> float:
        """Tokens a second of replicas that have measured theirs, for those that have not."""
        known = [n.report.tokens_per_s for n in self._replicas.values() if n.report and n.report.tokens_per_s]
        return sum(known) / len(known) if known else self._options.tokens_per_s

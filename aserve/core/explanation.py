"""Explanation: why a request took as long as it did, and what it got of the cache; as a value, for who asked for one.

    |- prepare -|-- queued --|- prefill -|-- decode --|- preempted -|- recompute -|-- decode --|- publish -|
    came        taken        a row       first token                a row again                last token  told

At every moment a request is in one phase, so that they sum to the whole. Of several choices the one that is furthest
says which: one that decodes before one that computes its prompt before one that computes again before one that waits.
Times are milliseconds, of whole microseconds each; positions and lengths are tokens.
"""

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

PHASES: Final = ("prepare", "queued", "prefill", "decode", "preempted", "recompute", "publish")
"""prepare: until the scheduler has it (its body is read, its text tokenized, its adapter loaded, its structure
compiled). queued: until its first row. prefill: until its first token. decode: until its last. preempted: it had a row
and waits for one again. recompute: until what it had computed before is computed again. publish: from its last token
until the answer is made of it. Of a request that asked for no explanation: queued, and running, which is the rest."""

Reason = Literal["off", "scored", "evicted", "in_flight", "salt", "adapter", "other_tokens", "not_seen"]


class Difference(msgspec.Struct, frozen=True):
    """Where the prompt first differs from what is cached, and why nothing is found from there on.

    position: of the first token that was not found; where reason is "other_tokens", of the first that is another.
    reason: "off", there is no prefix cache; "scored", scores of the prompt need all of it computed; "evicted", it was
    cached, and others needed the memory, or the cache was reset; "in_flight", another request was computing the same
    tokens and had not got there; "salt", it is cached without this request's cache_salt; "adapter", it is cached for
    another adapter, or the model as it is; "other_tokens", the request that is nearest to it went on otherwise;
    "not_seen", none of these is known to be so. What is cached for other tenants and under other salts is not known.
    relative: the id of the request that is meant, with "in_flight" and "other_tokens", where it is the tenant's own.
    model: which adapter, or the model, it is cached for, with "adapter".
    """

    position: int
    reason: Reason
    relative: str | None = None
    model: str | None = None


class Prefix(msgspec.Struct, frozen=True):
    """What of a choice's prompt was there when it got its first row.

    source: "cache" where it was found by its hashes, "fork" where it is shared with another choice, or with the
    generation that it branches from, "none" where nothing was found. cached_tokens: as the token counts have them; of
    a choice that shares with another, those of that one. shared_tokens: that needed no computing for this one.
    cacheable_tokens: whole blocks of the prompt but for its last token, which is computed in any case. differs: None
    where all of them were there.
    """

    cached_tokens: int
    shared_tokens: int
    cacheable_tokens: int
    source: Literal["cache", "fork", "none"]
    differs: Difference | None


class Chunk(msgspec.Struct, frozen=True):
    """Known tokens that a step computed. ms: how long the step had the device. again: they were computed before."""

    step: int
    start: int
    tokens: int
    ms: float
    again: bool


class Preemption(msgspec.Struct, frozen=True):
    """A row that was lost. at_ms: since the request came. because: "memory", or "failed_step" for one that was undone.

    kind: "swap" where its blocks went to the host, "recompute" where they were given up, or their copy was lost.
    computed_tokens: that it had. blocks_out, blocks_in: copied to the host, and back; what the
    device still had is not copied back. recomputed_tokens: of those it
    had, that were computed again; others were found in the cache. waited_ms: without a row. recompute_ms: until what it
    had was computed again. lost_ms: both.
    """

    at_ms: float
    kind: Literal["swap", "recompute"]
    because: Literal["memory", "failed_step"]
    computed_tokens: int
    blocks_out: int
    blocks_in: int
    recomputed_tokens: int
    waited_ms: float
    recompute_ms: float
    lost_ms: float


class Course(msgspec.Struct, frozen=True):
    """One sequence of the request: a choice, or one of those of which the best are returned, or a beam.

    state: "waiting", "running", "swapped" or "finished". prefix: None until it has had a row. chunks: the first of
    num_chunks; a step with one more token of the answer is none. preemptions: likewise, of num_preemptions.
    """

    index: int
    state: str
    tokens: int
    prefix: Prefix | None
    num_chunks: int
    chunks: tuple[Chunk, ...]
    num_preemptions: int
    preemptions: tuple[Preemption, ...]


class Held(msgspec.Struct, frozen=True):
    """Why it was not admitted, for so long, by so many plans. reason: as `scheduler.states.Hold`, of the first of those
    who waited, behind whom all others do; "step" until the first plan that was made with it waiting."""

    reason: str
    ms: float
    plans: int


class Queued(msgspec.Struct, frozen=True):
    """What it found when it came, in sequences. ahead: of those who waited, whom the policy had before it."""

    waiting: int
    ahead: int
    running: int
    swapped: int
    holds: tuple[Held, ...]


class Steps(msgspec.Struct, frozen=True):
    """The steps that it had a part in. share_ms: the sum over them of the step's time, times the request's tokens of
    the step's; it is a share of costs, and no time that the request alone took. total_ms: their whole time. failed:
    steps that raised and were undone, besides.
    """

    num: int
    failed: int
    share_ms: float
    total_ms: float


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Of one prompt. id: the engine's. name: what its client calls it; others may have the same. arrived: seconds since
    1970. state: "waiting", "running" or "ended". explained: whether it asked for an explanation; of one that did not,
    what is None here is not known. phases_ms: see `PHASES`; they sum to total_ms.
    """

    id: str
    name: str
    model: str
    state: Literal["waiting", "running", "ended"]
    explained: bool
    arrived: float
    total_ms: float
    phases_ms: Mapping[str, float]
    prompt_tokens: int
    queue: Queued | None
    steps: Steps | None
    choices: tuple[Course, ...]

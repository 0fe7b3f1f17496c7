"""Prefixes: why no more of a prompt was found in the cache, from what may be told to who asks.

The cache knows hashes and no tokens. A block that was not found is asked for in other ways, and each of them is one
that the asker could have tried himself (ADR 0020): the same tokens without his salt, or for another adapter. Tokens
are compared with those of his own tenant's requests alone, under the same salt and adapter: where somebody else's
prompt goes on otherwise would tell him of it token by token what he now has to guess by whole blocks.

    cached  | block 0 | block 1 |        block 2 was not found: its position is told to the token where one of his own
    asked   | block 0 | block 1 | a b c X ...                   requests has  a b c Y  there, and else to the block
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

import msgspec

from aserve.core.explanation import Difference, Prefix, Reason
from aserve.core.ids import AdapterId, BlockHash, RequestId
from aserve.core.request import Request
from aserve.scheduler.readings import Readings
from aserve.scheduler.sequence import Sequence


class Names(Protocol):
    """What the model and its adapters are called."""

    model_name: str
    adapter_names: Callable[[], Mapping[AdapterId, str]]


class Relative(NamedTuple):
    """A sequence to compare with. hashes: of its table. num_landed: None while it has not ended, and its newest blocks
    are not cached yet; then, how many of its tokens were computed."""

    request: Request
    hashes: list[BlockHash]
    token_ids: "array[int]"
    num_landed: int | None

    @classmethod
    def of(cls, sequence: Sequence, num_landed: int | None = None) -> "Relative":
        """What is needed of a sequence."""
        return cls(sequence.request, sequence.table.hashes, sequence.token_ids, num_landed)


class _Near(NamedTuple):
    """The relative that has most in common. num_common: tokens of the block that was not found."""

    relative: Relative
    num_common: int


def prefix_of(
    sequence: Sequence, start: int, readings: Readings, remembered: Iterable[Relative], names: Names
) -> Prefix:
    """Of a sequence that has just got its first row, and computes from position `start` on."""
    block_size = readings.cache.block_size
    num_cacheable = (sequence.num_prompt - 1) // block_size * block_size
    group = sequence.group
    is_common = group is not None and sequence.index > 0 and start == group.num_common > 0
    is_fork = start % block_size != 0 or is_common
    differs = None
    if not is_fork and sequence.num_cached < num_cacheable:
        differs = _difference(sequence, readings, remembered, names)
    source = "fork" if is_fork else "cache" if start else "none"
    return Prefix(sequence.num_cached, start, num_cacheable, source, differs)  # type: ignore[arg-type]  # one of the three


def _difference(sequence: Sequence, readings: Readings, remembered: Iterable[Relative], names: Names) -> Difference:
    cache, request = readings.cache, sequence.request
    span, position = sequence.num_cached // cache.block_size, sequence.num_cached
    if not cache.caches_prefixes:
        return Difference(position, "off")
    if sequence.sampling.num_prompt_logprobs is not None or request.per_token:
        return Difference(position, "scored")
    if cache.was_evicted(sequence.table, span):
        return Difference(position, "evicted")
    near = _nearest(sequence, span, cache.block_size, readings, remembered)
    if near is not None and near.num_common == cache.block_size:
        return _of_equal(near.relative, position, cache.block_size)
    unsalted = msgspec.structs.replace(request, cache_salt=_unsalted(request))
    if unsalted.cache_salt != request.cache_salt and _is_cached(readings, unsalted, span):
        return Difference(position, "salt")
    adapters = names.adapter_names()
    for adapter in (None, *adapters):
        other = msgspec.structs.replace(request, adapter=adapter)
        if adapter != request.adapter and _is_cached(readings, other, span):
            model = names.model_name if adapter is None else adapters[adapter]
            return Difference(position, "adapter", model=model)
    if near is None:
        return Difference(position, "not_seen")
    position += near.num_common
    goes_on = len(near.relative.token_ids) > position
    reason: Reason = "other_tokens" if goes_on else "not_seen"
    return Difference(position, reason, relative=near.relative.request.id if goes_on else None)


def _of_equal(relative: Relative, position: int, block_size: int) -> Difference:
    """One of its own has the same tokens, and they are not cached: not yet, not any more, or they never were."""
    if relative.num_landed is None:
        return Difference(position, "in_flight", relative=relative.request.id)
    return Difference(position, "evicted" if position + block_size <= relative.num_landed else "not_seen")


def _nearest(
    sequence: Sequence, span: int, block_size: int, readings: Readings, remembered: Iterable[Relative]
) -> _Near | None:
    """Of the same tenant's, with the same salt, adapter and tokens up to a span, who has most of it in common."""
    request, hashes = sequence.request, sequence.table.hashes
    block = sequence.token_ids[span * block_size : (span + 1) * block_size]
    nearest: _Near | None = None
    for relative in (*_there(readings, request.id), *remembered):
        other = relative.request
        if (other.tenant, other.adapter) != (request.tenant, request.adapter):
            continue
        if len(relative.hashes) <= span or relative.hashes[span] != hashes[span]:
            continue
        theirs = relative.token_ids[span * block_size : (span + 1) * block_size]
        num_common = next((i for i, (a, b) in enumerate(zip(block, theirs, strict=False)) if a != b), len(theirs))
        if (span or num_common) and (nearest is None or num_common > nearest.num_common):
            nearest = _Near(relative, num_common)
    return nearest


def _there(readings: Readings, request_id: RequestId) -> Iterator[Relative]:
    """All that have not ended, but the request's own."""
    return (Relative.of(sequence) for sequence in readings.sequences if sequence.request_id != request_id)


def _unsalted(request: Request) -> bytes:
    """The salt that the request would have if it named none: that of its tenant, if it shares with nobody."""
    tenant, at, _ = request.cache_salt.rpartition(b"@")
    return tenant + at


def _is_cached(readings: Readings, request: Request, span: int) -> bool:
    """Whether a span of a prompt, and all before it, would be found. Most are told by their first block."""
    cache = readings.cache
    table = cache.new_table(request.cache_salt, (), request.extra_keys)
    lengths = (cache.block_size, (span + 1) * cache.block_size)
    return all(cache.num_cached(table, request.prompt_token_ids[: length + 1]) == length for length in lengths)

"""How much of a prompt is cached, where layers with sliding windows keep the newest positions only.

A full group has to have every span of a prefix. A window's group has to have those that the first position after the
prefix sees; all before them is null, cached or not:

    window 5, P = 2     prefix of 4 spans, next position 8:      sees 4 .. 8
                        [ 0 , 0 , a , b ]

So a shorter prefix may be whole where a longer one is not, and the other way round. Knows no block and no pool: what
is cached is asked for by name.
"""

from collections.abc import Callable, Sequence

from aserve.core.ids import BlockHash
from aserve.core.layout import Window, first_visible_span


def block_name(span_hash: BlockHash, group: int) -> BlockHash:
    """The name of a group's block in the span: the first group's is the span's hash itself."""
    return BlockHash(span_hash + bytes((group,))) if group else span_hash


def longest_prefix(
    span_hashes: Sequence[BlockHash], windows: Sequence[Window], block_size: int, is_cached: Callable[[BlockHash], bool]
) -> int:
    """Spans of the longest prefix that every group has its part of."""
    num_spans = len(span_hashes)
    for group, window in enumerate(windows):
        if window is None:
            names = (block_name(span_hash, group) for span_hash in span_hashes[:num_spans])
            num_spans = next((span for span, name in enumerate(names) if not is_cached(name)), num_spans)
    agreed = -1
    while agreed != num_spans:
        agreed = num_spans
        for group, window in enumerate(windows):
            if window is not None:
                num_spans = _longest_in_window(span_hashes[:num_spans], group, window, block_size, is_cached)
    return num_spans


def _longest_in_window(
    span_hashes: Sequence[BlockHash], group: int, window: int, block_size: int, is_cached: Callable[[BlockHash], bool]
) -> int:
    """From the end: a span that is missing rules out every prefix that sees it, which are those that end behind it."""
    end = span = len(span_hashes)
    while span > first_visible_span(end * block_size, window, block_size):
        span -= 1
        if not is_cached(block_name(span_hashes[span], group)):
            end = span
    return end

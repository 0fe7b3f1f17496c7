"""Which layers share a block, and how many blocks a sequence needs. Pure arithmetic over sliding windows.

A layer with a sliding window sees the newest positions only, so that it need not keep as many as a layer with full
attention. A block therefore holds `block_size` positions of one *layer group*: layers with one kind of attention, as
many in each group, so that all groups draw equal blocks from one pool (vLLM's hybrid KV cache manager). A *span* of a
sequence, block_size consecutive positions, takes a block per group; in a window's group only until nobody sees it.

    Gemma 3, 26 layers, every sixth of full attention:    group 0    4 full layers                 all spans
                                                          1 to 6     4, 4, 4, 4, 4, 2 of windows   the newest spans

A model with one kind of attention has one group, in which a span is a block. Knows no block id and no memory.
"""

import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

MAX_GROUPS: Final = 8
"""Each lengthens every block table; with more of them padding is saved, and little else."""

Window = int | None
"""Positions that a token sees, its own included; None for all."""


class KVLayout(msgspec.Struct, frozen=True):
    """windows: of each layer group. places: of each layer, its group, and which of the group's layers it is."""

    windows: tuple[Window, ...]
    places: tuple[tuple[int, int], ...]

    @property
    def num_groups(self) -> int:
        """Blocks in a span."""
        return len(self.windows)

    @property
    def layers_per_group(self) -> int:
        """Layers that a block holds; a group with fewer leaves the rest unused."""
        return 1 + max(place for _, place in self.places)


def lay_out(layer_windows: Sequence[Window], context_len: int) -> KVLayout:
    """Group a model's layers. context_len: tokens of a sequence at most; a window as long is as good as none.

    A very long sequence spends memory on full attention alone, a short one on all groups and on what the last of a
    kind leaves unused. The group size is the one that is best for both together, if it is better than one group of all.
    """
    kinds: dict[Window, list[int]] = {}
    for layer, window in enumerate(layer_windows):
        kinds.setdefault(None if window is None or window >= context_len else window, []).append(layer)

    def cost(size: int) -> int:
        num_groups = {window: -(-len(layers) // size) for window, layers in kinds.items()}
        total = sum(num_groups.values())
        return (num_groups.get(None, 0) + total) * size if total <= MAX_GROUPS else sys.maxsize

    size = min(range(len(layer_windows), 0, -1), key=cost)
    if cost(size) >= 2 * len(layer_windows):
        return one_group(len(layer_windows))
    windows: list[Window] = []
    places = [(0, 0)] * len(layer_windows)
    for window, layers in kinds.items():
        for index, layer in enumerate(layers):
            if index % size == 0:
                windows.append(window)
            places[layer] = (len(windows) - 1, index % size)
    return KVLayout(tuple(windows), tuple(places))


def one_group(num_layers: int) -> KVLayout:
    """All layers keep all positions."""
    return KVLayout((None,), tuple((0, layer) for layer in range(num_layers)))


def first_visible_span(position: int, window: int, block_size: int) -> int:
    """The span of the first position that a token at `position` sees through the window."""
    return max(0, position - window + 1) // block_size


STRETCH: Final = 32
"""A chunk may be longer by one in so many tokens, if it is then its prompt's last."""


def block_bytes(bytes_per_token: int, draft_bytes_per_token: int, block_size: int, num_groups: int) -> int:
    """Of a block on the device, with what a draft model keeps of its positions: of a span of blocks it has one."""
    return bytes_per_token * block_size + -(-draft_bytes_per_token * block_size // num_groups)


def stretched(num_tokens: int, budget: int) -> int:
    """Tokens that a step of up to `num_tokens`, or a chunk of as many, can have come to: those of a whole step stretch.

    So 528 tokens are one step where the budget is 512, and not two, of which the second is for 16.
    """
    return num_tokens + num_tokens // STRETCH if num_tokens == budget else num_tokens


class Footprint(msgspec.Struct, frozen=True):
    """How many blocks sequences hold at most, where `max_chunk` tokens of one are computed in a step at most.

    windows: of each layer group.
    """

    windows: tuple[Window, ...]
    block_size: int
    max_chunk: int

    @property
    def has_windows(self) -> bool:
        """Whether any group gives blocks back before its sequence ends."""
        return any(window is not None for window in self.windows)

    def first_visible(self, position: int) -> Iterator[tuple[int, int]]:
        """Of each group with a window, the first span that the position sees."""
        for group, window in enumerate(self.windows):
            if window is not None:
                yield group, first_visible_span(position, window, self.block_size)

    def peak(self, num_tokens: int, *, width: int = 1, num_common: int = 0) -> int:
        """Blocks of `width` sequences that grow to `num_tokens`, with their first `num_common` spans in common.

        A window's group holds what the first position in flight sees, two steps of positions from there on, and an odd
        span at either end and for those that have landed since the last full span.
        """
        num_spans = -(-num_tokens // self.block_size)
        num_full = num_common + width * (num_spans - num_common)
        total = 0
        for window in self.windows:
            if window is None:
                total += num_full
            else:
                total += min(num_full, width * (-(-(window + 2 * self.max_chunk) // self.block_size) + 2))
        return total

    def longest(self, num_blocks: int, max_tokens: int, *, width: int = 1, num_common: int = 0) -> int:
        """Tokens that such sequences can have in so many blocks, and `max_tokens` at most."""
        num_spans = bisect_right(
            range(1, -(-max_tokens // self.block_size) + 1),
            num_blocks,
            key=lambda spans: self.peak(spans * self.block_size, width=width, num_common=num_common),
        )
        return min(num_spans * self.block_size, max_tokens)

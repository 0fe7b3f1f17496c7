"""GraphSizes: which steps with prompts a GPU runs as one launch, so that plans can fill them. Pure arithmetic.

A graph computes as many tokens as it was captured with, so that a step is padded up to one: by sequences that decode,
and by tokens of prompts. A step that no graph holds, or only with much padding, is launched kernel by kernel. Beside 42
sequences that decode a prompt of 1,000 tokens, of which a step may compute 400, is therefore computed by 369: the graph
of 64 sequences and 384 tokens takes 11 ms, while the launches of 400 tokens take 12 to 18 (Llama-3.1-8B on an H200).
"""

from bisect import bisect_left
from itertools import product
from typing import Final

import msgspec

MOST_PADDED: Final = 1.25
"""Tokens with padding for each one without, at most; more would take longer than launches do."""


class GraphSizes(msgspec.Struct, frozen=True):
    """All pairs of these numbers are graphs.

    decodes: sequences that decode, ascending. tokens: of prompts, ascending. num_prompts: places for prompts, one of
    which pads; a place that is left over takes a token. cheap_tokens: so many may be computed for fewer, however few.
    """

    decodes: tuple[int, ...]
    tokens: tuple[int, ...]
    num_prompts: int
    cheap_tokens: int

    def all(self) -> list[tuple[int, int]]:
        """Sequences and tokens of each graph; those that compute the most first."""
        return sorted(product(self.decodes, self.tokens), key=lambda size: (sum(size), size), reverse=True)

    def choose(self, num_decodes: int, num_prompts: int, num_tokens: int) -> tuple[int, int] | None:
        """The smallest graph for so many sequences that decode, prompts, and tokens of these.

        None where there is none, or only with too much padding.
        """
        decodes = bisect_left(self.decodes, num_decodes)
        tokens = bisect_left(self.tokens, num_tokens + self.num_prompts - num_prompts)
        if not 0 < num_prompts < self.num_prompts or decodes == len(self.decodes) or tokens == len(self.tokens):
            return None
        size = self.decodes[decodes], self.tokens[tokens]
        limit = max(self.cheap_tokens, MOST_PADDED * (num_decodes + num_tokens))
        return size if sum(size) <= limit else None

    def fill(self, num_decodes: int, num_prompts: int, num_tokens: int, limit: float, *, is_all: bool) -> int:
        """How many of so many tokens of prompts a step best computes: as many as fill a graph, or all.

        limit: tokens of prompts that the step may compute. is_all: no more prompts come. All are computed, too, where
        there are, or may be, so many that the device is busy with them for longer than their launches take.
        """

        def fits(num_tokens: int) -> bool:
            size = self.choose(num_decodes, num_prompts, num_tokens)
            return size is not None and sum(size) <= max(num_decodes + limit, self.cheap_tokens)

        rooms = [size + num_prompts - self.num_prompts for size in reversed(self.tokens)]
        if (num_tokens if is_all else limit) > MOST_PADDED * max(rooms, default=0):
            return num_tokens
        rooms = [room for room in rooms if room > 0 and fits(room)]
        if not rooms or (num_tokens <= rooms[0] and (not is_all or fits(num_tokens))):
            return num_tokens
        return next((room for room in rooms if room <= num_tokens), num_tokens)

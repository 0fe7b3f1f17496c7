"""Which decoding steps become graphs, and in which order: sizes of batches, lengths of contexts, ways to sample."""

from itertools import chain, product
from typing import Final, NamedTuple

BUCKET_STEP: Final = 8
SHORTEST_CONTEXT: Final = 2048
CONTEXT_FACTOR: Final = 4
"""Graphs are for contexts of at most 2048 positions, 8192, and so on: how attention is split depends on it."""
MAX_GRAPHS: Final = 128
"""Of decoding steps. Each takes memory for its nodes, beside what all share."""


class Kind(NamedTuple):
    """Which kernels sample, see SamplingBatch. What filters also draws and takes the likeliest, at some cost.

    is_masked: rows may have a mask. Its words are read where they lie, and all bits are 1 for a row without one.
    """

    all_greedy: bool
    any_filter: bool
    is_masked: bool = False


MASKED: Final = Kind(all_greedy=False, any_filter=True, is_masked=True)
FILTERED: Final = Kind(all_greedy=False, any_filter=True)
DRAWN: Final = Kind(all_greedy=False, any_filter=False)
GREEDY: Final = Kind(all_greedy=True, any_filter=False)
KINDS: Final = (MASKED, FILTERED, DRAWN, GREEDY)
"""Each does what those after it do."""


class GraphKey(NamedTuple):
    """What is fixed in a graph: at most so many rows, contexts of at most so many positions, and how it samples.

    adapted: rows may have adapters, of any mixture; those without one are computed too, by some launches more.
    """

    bucket: int
    max_seq_len: int
    kind: Kind
    adapted: bool = False

    def covers(self, other: "GraphKey") -> bool:
        """Whether the graph computes the steps of the other one too, with more padding."""
        return (
            self.bucket >= other.bucket
            and self.max_seq_len >= other.max_seq_len
            and KINDS.index(self.kind) <= KINDS.index(other.kind)
            and self.adapted >= other.adapted
        )

    @property
    def cost(self) -> tuple[int, int, int, bool]:
        """Larger for a graph that takes longer, as a rule."""
        return self.bucket, self.max_seq_len, -KINDS.index(self.kind), self.adapted


def capture_order(max_num_seqs: int, max_model_len: int, *, adapted: bool = False) -> list[GraphKey]:
    """The graphs that are captured unasked: the largest of each kind, then those for short contexts, large ones first.

    The first is larger than any other, in every respect. What it leaves free in the pool of all graphs therefore holds
    each of the others, whenever it is captured, and the pool stays as large as it was after the first. Of those that
    mask only the largest is among them: not all servers are ever asked for a structure.
    adapted: rows may have adapters; steps without any have their own graphs when they have come up often.
    """
    largest = [GraphKey(max_num_seqs, max_model_len, kind, adapted) for kind in KINDS]
    shortest = context_bounds(max_model_len)[0]
    others = product(reversed(buckets(max_num_seqs)), [shortest], KINDS[1:], [adapted])
    return list(dict.fromkeys([*largest, *(GraphKey(*other) for other in others)]))[:MAX_GRAPHS]


def num_decode_graphs(max_num_seqs: int, max_model_len: int) -> int:
    """How many there may be in the end, of decoding steps."""
    return min(MAX_GRAPHS, len(buckets(max_num_seqs)) * len(context_bounds(max_model_len)) * len(KINDS))


def buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes that are captured: 1, 2, 4, 8, 16, 24, 32 and on by 8, and the largest."""
    sizes = chain((1, 2, 4), range(BUCKET_STEP, max_num_seqs, BUCKET_STEP))
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def context_bounds(max_model_len: int) -> tuple[int, ...]:
    """Longest contexts of graphs, in ascending order."""
    bounds = [SHORTEST_CONTEXT]
    while bounds[-1] < max_model_len:
        bounds.append(bounds[-1] * CONTEXT_FACTOR)
    return (*bounds[:-1], max_model_len)


def context_bound(seq_len: int, max_model_len: int) -> int:
    """The longest context of the graphs that serve this one."""
    return next(bound for bound in context_bounds(max_model_len) if bound >= seq_len)

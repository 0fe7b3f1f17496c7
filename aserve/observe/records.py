"""Records: what happened in a step, or between steps, as values.

A `Snapshot` is all that is there at a moment, a `Record` what has changed since the one before it: a snapshot, changed
by the records behind it in their order, is the snapshot of a later moment. That is the law of tests/observe.

    snapshot(n)  record n+1  record n+2  ...          Held.apply(record) leads from each to the next

Sequences, rows of a plan and blocks are told by their numbers. A sequence is one choice of a request; the request's
number is that of its first sequence. Who a request is, and what was said, is on its `Card`, and in `Record.decoded`.
Times are whole microseconds of the engine's clock, which begins nowhere in particular.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

MAX_CARD_TOKENS: Final = 256
"""Of a prompt, that a card has."""
MAX_QUEUED: Final = 64
"""Of those who wait, that are told by number."""

NO_TOKEN: Final = -1

Pair = tuple[int, int]


class CardNumbers(msgspec.Struct, frozen=True, gc=False):
    """Of a sequence. request: the number of its request. index: which choice of it.

    num_prompt, max_tokens: in tokens. arrived_us: when its request came.
    """

    seq: int
    request: int
    index: int
    num_prompt: int
    max_tokens: int
    arrived_us: int


class Card(CardNumbers, frozen=True, gc=False):
    """Who a sequence is. shows_tokens: whether what is sampled for it is its answer, which is not so for a beam.

    prompt_ids: the prompt's first tokens. explains: whether it asked for an explanation.
    """

    shows_tokens: bool
    id: str
    tenant: str
    lora: int | None
    prompt_ids: tuple[int, ...]
    explains: bool = False


class Piece(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What a step computed of a sequence, where that is more than the next token of its answer.

    kind: "prefill" for known tokens of a prompt, or of an answer that is computed again; "draft" for a token and drafts
    behind it; "pooled" for a prompt of which a vector is made. num_drafts, num_accepted: of drafts.
    """

    seq: int
    kind: str
    start: int
    num_tokens: int
    num_drafts: int = 0
    num_accepted: int = 0


class Phases(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """How long the parts of a step took, in microseconds, in their order.

    flight: from its launch until it had landed. wait: the end of that, for which the loop had nothing else to do.
    """

    plan: int
    launch: int
    flight: int
    wait: int
    commit: int
    publish: int


class Work(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A step. began_us: when its plan was begun. decodes: sequences that computed one token of their answers each.

    num_draft_tokens: computed by a draft model beforehand. copies: blocks, from and to. swap_outs: from blocks of the
    device to those of the host, swap_ins: the other way.
    """

    step: int
    began_us: int
    phases: Phases
    decodes: tuple[int, ...] = ()
    pieces: tuple[Piece, ...] = ()
    num_draft_tokens: int = 0
    copies: tuple[Pair, ...] = ()
    swap_outs: tuple[Pair, ...] = ()
    swap_ins: tuple[Pair, ...] = ()


class Admission(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A sequence took a row. num_matched: its leading tokens that need no computing, which are in `blocks`, in order:
    each holds what follows upon the one before it.

    source: "cache" where they were found by their hashes, "fork" where they are shared with another that runs, "swap"
    where they came back from the host; "none" where there are none.
    """

    seq: int
    num_matched: int
    source: str
    blocks: tuple[int, ...]


class Move(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What became of a sequence: "recompute" or "swap" when it was preempted, "ended".

    why: of an end, if that is known: "stop" or "length"; "" where its text or its reader ended it.
    """

    seq: int
    what: str
    why: str = ""


class Queue(msgspec.Struct, frozen=True, gc=False):
    """Who waits. first: the first of them. hold: why the very first was not admitted, see scheduler/states.py; "" where
    nobody waits, or no plan has been made since it came.
    """

    num_waiting: int = 0
    first: tuple[int, ...] = ()
    hold: str = ""


class Splice(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A sequence's table has changed: its first `num_kept` entries are as they were, and these are behind them."""

    seq: int
    num_kept: int
    blocks: tuple[int, ...]


class BlockChange(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """tables: of sequences on the device; a block's holders are the tables that have it, and 0 is no block.

    host_tables: of those that are swapped out. cached, uncached: blocks that can be found by hash from now on, or not
    any more; kept, dropped: the same of blocks on the host.
    """

    tables: tuple[Splice, ...] = ()
    host_tables: tuple[Splice, ...] = ()
    cached: tuple[int, ...] = ()
    uncached: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()


NO_CHANGE: Final = BlockChange()


class Crowd(msgspec.Struct, frozen=True, gc=False):
    """How many sequences of other tenants there are, for who is not told which; see others.py."""

    running: int = 0
    waiting: int = 0
    swapped: int = 0


class Record(msgspec.Struct, frozen=True, gc=False):
    """What happened up to `at_us`. number: one more than that of the record before it.

    cards: of sequences that have not been told of. work: None where it is not of a step. decoded: the token that each
    of its `decodes` got, `NO_TOKEN` where it is not told. token_ids: the sequences of its other pieces that got tokens,
    and which. queue: where it has changed. lag_us: how late the event loop came, where it was looked at. failed_step:
    one that raised, and was taken back. others: where it is told, and has changed.
    """

    number: int
    at_us: int
    cards: tuple[Card, ...] = ()
    work: Work | None = None
    decoded: tuple[int, ...] = ()
    token_ids: tuple[tuple[int, tuple[int, ...]], ...] = ()
    admitted: tuple[Admission, ...] = ()
    moves: tuple[Move, ...] = ()
    queue: Queue | None = None
    blocks: BlockChange = NO_CHANGE
    lag_us: int | None = None
    failed_step: int | None = None
    others: Crowd | None = None


class Run(msgspec.Struct, frozen=True, gc=False):
    """Records of steps one behind the other, in short: each computed the next token of the same sequences, `decodes`,
    and did nothing else, as most do. number: of the first.

    steps: of each the number, `at_us` of the record, `began_us`, and the six numbers of `Phases`. decoded: the tokens
    of each. blocks: what has changed, by places in `steps`, ascending.
    """

    number: int
    decodes: tuple[int, ...]
    steps: Sequence[tuple[int, ...]]
    decoded: Sequence[tuple[int, ...]]
    blocks: Sequence[tuple[int, BlockChange]] = ()

    def records(self) -> Iterator[Record]:
        """The same at length."""
        blocks = dict(self.blocks)
        for place, ((step, at_us, began_us, *phases), decoded) in enumerate(zip(self.steps, self.decoded, strict=True)):
            work = Work(step, began_us, Phases(*phases), self.decodes)
            change = blocks.get(place, NO_CHANGE)
            yield Record(self.number + place, at_us, work=work, decoded=decoded, blocks=change)


def at_length(told: Iterable[Record | Run]) -> Iterator[Record]:
    """Records, also of runs."""
    for one in told:
        if isinstance(one, Run):
            yield from one.records()
        else:
            yield one


class Snapshot(msgspec.Struct, frozen=True, gc=False):
    """What is there after the record of that number. states: of each sequence: "waiting", "running" or "swapped"."""

    number: int
    at_us: int
    cards: tuple[Card, ...]
    states: tuple[tuple[int, str], ...]
    queue: Queue
    blocks: BlockChange
    others: Crowd | None = None


class Held:
    """Who holds which blocks: what a snapshot says, changed by records. For whoever follows, as the page does.

    tables, host_tables: by sequence. cached, kept: blocks of the device, and of the host.
    """

    def __init__(self, change: BlockChange = NO_CHANGE) -> None:
        self.tables: dict[int, tuple[int, ...]] = {}
        self.host_tables: dict[int, tuple[int, ...]] = {}
        self.cached: set[int] = set()
        self.kept: set[int] = set()
        self.apply(change)

    def apply(self, change: BlockChange) -> None:
        """Take in what has changed."""
        for tables, splices in ((self.tables, change.tables), (self.host_tables, change.host_tables)):
            for splice in splices:
                blocks = tables.pop(splice.seq, ())[: splice.num_kept] + splice.blocks
                if blocks:
                    tables[splice.seq] = blocks
        self.cached = (self.cached | set(change.cached)) - set(change.uncached)
        self.kept = (self.kept | set(change.kept)) - set(change.dropped)

    def whole(self) -> BlockChange:
        """What makes the same of nothing."""
        return BlockChange(
            tuple(Splice(seq, 0, blocks) for seq, blocks in self.tables.items()),
            tuple(Splice(seq, 0, blocks) for seq, blocks in self.host_tables.items()),
            tuple(sorted(self.cached)),
            (),
            tuple(sorted(self.kept)),
            (),
        )

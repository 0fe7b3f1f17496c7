"""Roster: every sequence that has not ended, by its id and by its request; and what the ended ones leave behind.

What is left behind are the tokens of a choice, so that it can be continued (`Scheduler.fork`) until its request is
cancelled. Request "a" with n=2, whose choices end one after the other:

    added            requests {"a": [0, 1]}   sequences {0, 1}   histories {}
    choice 0 ends    requests {"a": [1]}      sequences {1}      histories {"a": {0: tokens}}
    choice 1 ends    requests {}              sequences {}       histories {"a": {0: tokens, 1: tokens}}
    cancelled        requests {}              sequences {}       histories {}

Knows no row and no step, and of blocks only that a sequence comes with a table.
"""

from array import array
from collections.abc import Callable, Collection, Iterable

from aserve.core.errors import InvalidRequestError
from aserve.core.ids import RequestId, SeqId
from aserve.core.plan import SeqSlice, StepPlan
from aserve.core.request import Request
from aserve.kv_cache.table import BlockTable
from aserve.scheduler.queue import Arrival, Policy
from aserve.scheduler.sequence import Group, Sequence, SortKey


class Roster:
    """policy: the order in which sequences run. sequences, requests, histories: for others to read."""

    def __init__(self, policy: Policy) -> None:
        self.sequences: dict[SeqId, Sequence] = {}
        self.requests: dict[RequestId, list[Sequence]] = {}
        self.histories: dict[RequestId, dict[int, array[int]]] = {}
        self._policy = policy
        self._next_seq_id = 0

    def next_key(self, arrival: Arrival) -> SortKey:
        """The place in the order of who comes next on these terms."""
        return self._policy(arrival, SeqId(self._next_seq_id))

    def check_unused(self, request_id: RequestId) -> None:
        """Raise `InvalidRequestError` while a request has that id."""
        if request_id in self.requests:
            raise InvalidRequestError(f"request id {request_id!r} is in use", "request_id")

    def enter(
        self, request: Request, context_len: int, new_table: Callable[[], BlockTable], origin: Sequence | None
    ) -> list[Sequence]:
        """Make a request's sequences and list them. context_len: tokens of each at most. origin: whom they continue."""
        self.histories.pop(request.id, None)
        beam = request.params.beam
        members: list[Sequence] = []
        for index in range(request.params.num_sequences if beam is None else beam.width):
            seq_id = SeqId(self._next_seq_id)
            self._next_seq_id += 1
            sequence = Sequence(seq_id, request, new_table(), self._policy(request, seq_id), context_len, index)
            sequence.origin = origin
            members.append(sequence)
            self.sequences[seq_id] = sequence
        self.requests[request.id] = members
        if len(members) > 1 or beam is not None:
            Group(request, members)
        return members

    def choice(self, request_id: RequestId, index: int) -> Sequence | None:
        """The sequence that answers as this choice; None if it has ended, or never was."""
        return next((sequence for sequence in self.requests.get(request_id, ()) if sequence.index == index), None)

    def history(self, request_id: RequestId, index: int) -> tuple[int, ...]:
        """Prompt and answer of a choice, as far as it has come. Raises `InvalidRequestError` where there is none."""
        members = self.requests.get(request_id, ())
        if any(sequence.is_held_back for sequence in members):
            raise InvalidRequestError("ranked choices and beams cannot be forked", "index")
        sequence = self.choice(request_id, index)
        if sequence is not None:
            return tuple(sequence.token_ids)
        ended = self.histories.get(request_id, {})
        if index not in ended:
            raise InvalidRequestError(f"request {request_id!r} has no choice {index} to continue", "index")
        return tuple(ended[index])

    def owned(self, plans: Iterable[StepPlan]) -> list[tuple[Sequence, SeqSlice]]:
        """The slices of the plans, oldest first, each with its sequence; without those of sequences that have ended."""
        return [
            (sequence, piece)
            for plan in plans
            for piece in plan.slices
            if (sequence := self.sequences.get(piece.seq_id)) is not None
        ]

    def leave(self, sequence: Sequence) -> None:
        """A sequence has ended. The tokens of a choice that can be forked are kept."""
        del self.sequences[sequence.id]
        members = self.requests[sequence.request_id]
        members.remove(sequence)
        if not sequence.is_held_back:
            self.histories.setdefault(sequence.request_id, {})[sequence.index] = sequence.token_ids
        if not members:
            del self.requests[sequence.request_id]

    def restart(self, wanted: Collection[RequestId], at: Sequence | None, *, is_landing: bool) -> Collection[SeqId]:
        """Keep the requests that are `wanted`, without the one at whose sequence a call raised, if it is to blame.

        at: whose token the call raised at, None where that is not known. is_landing: whether the call was to take the
        token in. Returns the ids that are forgotten.
        """
        self.requests = {name: members for name, members in self.requests.items() if name in wanted and members}
        self.histories = {name: past for name, past in self.histories.items() if name in wanted}
        if at is not None and self._is_to_blame(at, is_landing=is_landing):
            self.requests.pop(at.request_id, None)
        known = set(self.sequences)
        self.sequences.clear()
        self.sequences.update((sequence.id, sequence) for members in self.requests.values() for sequence in members)
        return known - self.sequences.keys()

    def _is_to_blame(self, sequence: Sequence, *, is_landing: bool) -> bool:
        """Whether it tore the bookkeeping at this token before, or has lost the token for good."""
        if is_landing and (sequence.is_held_back or sequence not in self.requests.get(sequence.request_id, ())):
            return True
        was_torn_at, sequence.torn_at = sequence.torn_at, len(sequence.token_ids)
        return was_torn_at == sequence.torn_at

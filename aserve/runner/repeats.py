"""Repeats: forward passes on a CPU by captured calls, of each number of tokens that comes up often.

    tokens that all count --> Repeats: calls for as many? -- yes: ids, positions, slots --> their memory; repeat them
                                 '- no: the eager way, and the third time they are captured

Kernels are called alike for nine sequences that decode and for one with eight drafts: whose the tokens are is in the
plan of attention alone, which is dealt anew. Steps of prompts, of which few tokens are wanted, go the eager way.

What they keep is small beside the weights, but there may be many: together they have `MAX_BYTES`, and those that were
not used for longest are let go. Same kernels, same arguments: same bits as the eager way.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, Protocol, TypeVar

from torch import Tensor

from aserve.kernels.native.captured_calls import CapturedCalls, UnrepeatableError
from aserve.kernels.native.native_ops import NativeOps
from aserve.kernels.ops import AttentionBatch, KVLayer, Ops
from aserve.models.interface import CausalLM, ForwardBatch
from aserve.models.sharding import ALONE, Shard

CAPTURE_AT: Final = 3
"""The so-manieth step of as many tokens is captured, of the latest `LATEST` steps that went the eager way."""
LATEST: Final = 8
MAX_BYTES: Final = 64 * 1024 * 1024
MAX_TOKENS: Final = 64
"""With more, what the Python between kernels takes does not count."""

_log = logging.getLogger(__name__)


class Captured(Protocol):
    """Whatever is captured of a step."""

    @property
    def calls(self) -> CapturedCalls:
        """Its kernels."""
        ...


C = TypeVar("C", bound=Captured)


class CapturedBySize(Generic[C]):
    """What is captured of steps, by their number of tokens."""

    def __init__(self) -> None:
        self._captured: OrderedDict[int, C] = OrderedDict()
        self._max_tokens = MAX_TOKENS
        self._latest: deque[int] = deque(maxlen=LATEST)
        """Of the steps that went the eager way, though they might be captured: how many tokens."""

    def get(self, num_tokens: int) -> C | None:
        """Of steps of so many tokens."""
        if (captured := self._captured.get(num_tokens)) is not None:
            self._captured.move_to_end(num_tokens)
        return captured

    def capture(self, num_tokens: int, capture: Callable[[], C]) -> C | None:
        """A step has come of which nothing is captured: capture it, if that is due and can be done.

        capture: computes the step. Where it raises `UnrepeatableError` it has done so too, and is not called again.
        """
        if num_tokens > self._max_tokens:
            return None
        self._latest.append(num_tokens)
        if self._latest.count(num_tokens) < CAPTURE_AT:
            return None
        try:
            captured = capture()
        except UnrepeatableError as error:
            self._max_tokens = 0
            _log.debug("steps are not repeated: %s", error)
            return None
        self._captured[num_tokens] = captured
        if captured.calls.num_bytes > MAX_BYTES:
            self._max_tokens = num_tokens - 1
        while sum(each.calls.num_bytes for each in self._captured.values()) > MAX_BYTES:
            self._captured.popitem(last=False)
        return captured


@dataclass(frozen=True, slots=True)
class _Captured:
    """Calls, and what they read that is a step's own. slots: for each group of layers."""

    calls: CapturedCalls
    token_ids_T: Tensor
    positions_T: Tensor
    slots: Sequence[Tensor]

    def repeat(self, token_ids_T: Tensor, batch: ForwardBatch, beginning: Callable[[], object]) -> Tensor:
        """Of another step. beginning: as of `CapturedCalls.repeat`."""
        self.token_ids_T.copy_(token_ids_T)
        self.positions_T.copy_(batch.positions_T)
        for own_T, slots_T in zip(self.slots, _slots(batch.attention), strict=True):
            own_T.copy_(slots_T)
        return self.calls.repeat(batch.attention, beginning)


class Repeats:
    """Of one model and its cache. Only for one thread.

    beginning: is called once in each step, as late as can be before anything of it is computed that takes long.
    """

    def __init__(
        self,
        model: CausalLM,
        ops: NativeOps,
        kv: Sequence[KVLayer],
        beginning: Callable[[], object] = lambda: None,
    ) -> None:
        self._model, self._ops, self._kv, self._beginning = model, ops, kv, beginning
        self._captured = CapturedBySize[_Captured]()

    def forward(self, token_ids_T: Tensor, batch: ForwardBatch) -> Tensor | None:
        """Hidden states, [T, E], which lie where the next step's will; None for steps that go the eager way."""
        num_tokens = len(token_ids_T)
        all_count = batch.lora is None and batch.wanted_N is None
        if all_count and (captured := self._captured.get(num_tokens)) is not None:
            return captured.repeat(token_ids_T, batch, self._beginning)
        self._beginning()
        if not all_count:
            return None
        captured = self._captured.capture(num_tokens, lambda: self._capture(token_ids_T, batch))
        return None if captured is None else captured.calls.result

    def _capture(self, token_ids_T: Tensor, batch: ForwardBatch) -> _Captured:
        """Compute the step, and keep how."""
        own = replace(batch, positions_T=batch.positions_T.clone(), attention=_own(batch.attention))
        ids_T = token_ids_T.clone()
        calls = CapturedCalls(self._ops, own.attention, lambda: self._model.forward(ids_T, self._kv, own))
        return _Captured(calls, ids_T, own.positions_T, tuple(_slots(own.attention)))


def repeats(
    model: CausalLM,
    ops: Ops,
    kv: Sequence[KVLayer],
    shard: Shard = ALONE,
    beginning: Callable[[], object] = lambda: None,
) -> Repeats | None:
    """Those of a model that is computed by our own kernels; None for others, and where ranks add up between kernels."""
    return Repeats(model, ops, kv, beginning) if type(ops) is NativeOps and shard.group is None else None


def _own(attention: AttentionBatch) -> AttentionBatch:
    """The same, with slots of its own."""
    return replace(attention, slots_T=attention.slots_T.clone(), groups=tuple(map(_own, attention.groups)))


def _slots(attention: AttentionBatch) -> Sequence[Tensor]:
    return [group.slots_T for group in attention.groups or (attention,)]

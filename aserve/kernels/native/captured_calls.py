"""Captured calls: a step's kernels, called again one after the other, without the Python that was between them.

Where few rows are computed, half of a layer's time is not its kernels: tensors are made, cut, looked at and let go. All
of that is the same at the next step, but for how many rows that has. So what one step called is kept:

    capture   forward(), sample() ----> kernel(a, b, 3), kernel(b, c, 3), ...
    resize    of a step of 40 rows:     a, b, c have room for as many, and calls learn of it (call_memory.py)
    repeat                              kernel(a, b, 40), kernel(b, c, 40), ...     by one call from Python (CallTable)

What differs from step to step is written to where it was read, but for attention, whose work is dealt anew.
The idea is that of CUDA's graphs, see runner/graphs.py; a CPU has nobody to hand them to.
"""

from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aserve.kernels.native.attention import Plan
from aserve.kernels.native.call_memory import CallMemory, Made, Places, UnrepeatableError
from aserve.kernels.native.call_table import CallTable
from aserve.kernels.native.library import Seen
from aserve.kernels.native.native_ops import NativeOps
from aserve.kernels.ops import AttentionBatch

_ATEN: Final = torch.ops.aten
_MAKES_ROOM: Final = frozenset({_ATEN.empty.memory_format, _ATEN.empty_like.default, _ATEN.new_empty.default})
_PLANS: Final = "plan_attention"
_ATTENDS: Final = "attend_"
_ATTENTION, _ITEMS, _PARTIALS = 0, 1, 7
"""What a step's plan of attention is among what attention takes."""
_REPEATABLE: Final = {
    "product_": Places(4, 3),
    "unpack_rows_": Places(3, 2),
    "rms_norm_": Places(6, 4),
    "silu_and_mul_": Places(2, 1),
    "gelu_and_mul_": Places(2, 1),
    "rope_and_write_kv_": Places(0, 11),
    _ATTENDS: Places(None, 6, frozenset({_ITEMS, _PARTIALS})),
    "sample_": Places(0, 2),
    "move_blocks": Places(0, 3),
}
"""Kernels that do the same again with the same arguments, by how their names begin."""


class Sizes(NamedTuple):
    """How many rows a step has: tokens, those of them whose hidden states are wanted, and those of these from which
    something is sampled: all, or 0, where hidden states are all that is asked for.
    """

    tokens: int
    wanted: int
    sampled: int


CAPTURED: Final = Sizes(3, 2, 2)
"""Of the step that is captured. Its tokens and those that are wanted are told apart by their number; and of a single
row torch says that it lies together, however it lies.
"""


class CapturedCalls:
    """What two stages computed, to be computed again by the thread that captured it.

    batch: what `forward` gives to attention. forward: makes hidden states, of `CAPTURED` tokens. sample: what comes of
    these. What was there before has to stay where it is. Raises `UnrepeatableError` where something would be missing;
    both have run to their end then.
    """

    def __init__(
        self, ops: NativeOps, batch: AttentionBatch, forward: Callable[[], Tensor], sample: Callable[[Tensor], Tensor]
    ) -> None:
        with ops.library.observed() as seen, _Memory(ops, seen) as memory:
            hidden_NE = forward()
            num_seen, num_made = len(seen), len(memory.made)
            ids_N = sample(hidden_NE)
        if memory.objection is not None:
            raise UnrepeatableError(memory.objection)
        self._num_forward = sum(kernel.name != _PLANS for kernel, _ in seen[:num_seen])
        calls = [call for call in seen if call[0].name != _PLANS]
        places = [_places(kernel.name) for kernel, _ in calls]
        self._attention = ops.attention
        self._scratch = ops.scratch  # which what sampling is called with points to
        self._attends = _attends(ops, calls, batch)
        self._table = CallTable(ops.library, calls)
        made = [_made(x, is_first=place < num_made) for place, x in enumerate(memory.made)]
        self._memory = CallMemory(self._table, places, made, (hidden_NE, ids_N))
        self._sizes: Sizes | None = None
        self._results: Sequence[Tensor] = ()
        self._batch: AttentionBatch | None = None
        self._plans: list[Plan] = []
        """What kernels are pointed to: kept while they may be called."""

    def num_bytes(self, sizes: Sizes) -> int:
        """About what steps of these sizes hand on from call to call."""
        return self._memory.num_bytes(sizes)

    def repeat(self, sizes: Sizes, batch: AttentionBatch, beginning: Callable[[], object]) -> Tensor:
        """Compute it for another step: what is sampled, or hidden states where nothing is, until the next step.

        batch: contexts; its slots are not read. One that is given again is that of the last step: its tensors may hold
        other contexts now, if these are as many tiles long.
        beginning: is called right before the kernels, which leave Python's lock to others until they have ended.
        """
        if sizes != self._sizes:
            self._results, self._sizes = self._memory.resize(sizes), sizes
        if batch is not self._batch:
            self._read(batch)
        beginning()
        if sizes.sampled:
            self._table.call()
        else:
            self._table.call(self._num_forward)
        return self._results[sizes.sampled > 0]

    def _read(self, batch: AttentionBatch) -> None:
        """Have attention read the contexts of this batch."""
        groups = batch.groups or (batch,)
        self._batch, self._plans = batch, []
        for (place, layout), calls in self._attends.items():
            plan = self._attention.plan(groups[place], layout)
            self._plans.append(plan)
            self._table.change(calls, _ATTENTION, addressof(plan.attention))
            self._table.change(calls, _ITEMS, addressof(plan.items))
            self._table.change(calls, _PARTIALS, plan.partials.data_ptr())


def _places(kernel: str) -> Places:
    for beginning, places in _REPEATABLE.items():
        if kernel.startswith(beginning):
            return places
    raise UnrepeatableError(kernel)


def _attends(ops: NativeOps, calls: Seen, batch: AttentionBatch) -> dict[tuple[int, Any], list[int]]:
    """The calls that a step's plan of attention goes to, by the group of the layer and its layout."""
    groups = batch.groups or (batch,)
    found: dict[tuple[int, Any], list[int]] = {}
    for place, (kernel, arguments) in enumerate(calls):
        if kernel.name.startswith(_ATTENDS):
            if (plan := ops.attention.planned(arguments[_ATTENTION])) is None:
                raise UnrepeatableError("layers of very many kinds")
            group = next(place for place, group in enumerate(groups) if group is plan.batch)
            found.setdefault((group, plan.layout), []).append(place)
    return found


def _made(x: Tensor, *, is_first: bool) -> Made:
    """What was made in the first stage or in the second."""
    kinds = (0, 1) if is_first else (2,)
    num_rows = x.shape[0] if x.dim() else 0
    return Made(x, next((kind for kind in kinds if CAPTURED[kind] == num_rows), None), num_rows)


class _Memory(TorchDispatchMode):
    """Keeps what torch makes, and notes the first thing that it does besides making room and looking at it anew.

    What takes rows of a table is noted among the kernels, as the one of ours that takes the same: an embedding, and the
    tokens that are wanted.
    """

    def __init__(self, ops: NativeOps, seen: Seen) -> None:
        super().__init__()
        self._ops, self._seen = ops, seen
        self.made: list[Tensor] = []
        self.objection: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch imports its compiler, which takes a second, to keep it from compiling what stands below."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _MAKES_ROOM:
            self.made.append(out)
        elif (ids := _ids_of_rows(func, args)) is not None:
            self.made.append(out)
            self._seen.append(self._ops.moves.rows_call(args[0], ids, out))
        elif not (func.is_view and _is_same_memory(args[0], out)):
            self.objection = self.objection or str(func)
        return out


def _ids_of_rows(func: Any, args: tuple[Any, ...]) -> Tensor | None:
    """Which rows are taken of a table, args[0]; None for what takes none."""
    ids: Tensor | None = None
    if func is _ATEN.embedding.default and args[1].dim() == 1:
        ids = args[1]
    elif func is _ATEN.index_select.default and args[0].dim() == 2 and args[1] == 0:
        ids = args[2]
    return ids


def _is_same_memory(x: Tensor, views: Tensor | Sequence[Tensor]) -> bool:
    """What torch calls a view may be a copy."""
    address = x.untyped_storage().data_ptr()
    return all(
        view.untyped_storage().data_ptr() == address for view in ([views] if isinstance(views, Tensor) else views)
    )

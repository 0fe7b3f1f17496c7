"""Captured calls: a step's kernels, called again one after the other, without the Python that was between them.

Where few rows are computed, half of a layer's time is not its kernels: tensors are made, cut, looked at and let go. All
of that is the same at the next step of as many rows, if only the memory stays where it is. So what one step called is
kept, with the addresses that it called it with, and the memory that these are of:

    capture   work() ----> kernel(a, b), kernel(b, c), ...      a, b, c are kept
    repeat                 kernel(a, b), kernel(b, c), ...      as often as wanted, by one call from Python (CallTable);
                                                                the result lies in c again

What differs from step to step is written to where it was read, but for attention, whose work is dealt anew.
The idea is that of CUDA's graphs, see runner/graphs.py; a CPU has nobody to hand them to.
"""

from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aserve.kernels.native.attention import Plan
from aserve.kernels.native.call_table import CallTable
from aserve.kernels.native.library import Kernel, Seen
from aserve.kernels.native.native_ops import NativeOps
from aserve.kernels.ops import AttentionBatch

_ATEN: Final = torch.ops.aten
_MAKES_ROOM: Final = frozenset({_ATEN.empty.memory_format, _ATEN.empty_like.default, _ATEN.new_empty.default})
_PLANS: Final = "plan_attention"
_ATTENTION, _ITEMS, _PARTIALS = 0, 1, 7
"""What a step's plan of attention is among the integers that attention takes."""
_REPEATABLE: Final = (
    *("product_", "unpack_rows_", "rms_norm_", "silu_and_mul_", "gelu_and_mul_", "rope_and_write_kv_"),
    *("attend_", "sample_", "move_blocks", _PLANS),
)
"""How the names of kernels begin that do the same again with the same arguments."""


class UnrepeatableError(Exception):
    """Something else was done than kernels can do again; which."""


class CapturedCalls:
    """What `work` computed, to be computed again, by the thread that captured it.

    batch: what `work` gives to attention. It has to stay where it is, as has all that was made before. `result` is what
    `work` returned. Raises `UnrepeatableError` where something would be missing; `work` has run to its end then.
    """

    def __init__(self, ops: NativeOps, batch: AttentionBatch, work: Callable[[], Tensor]) -> None:
        with ops.library.observed() as seen, _Memory(ops, seen) as memory:
            self.result = work()
        if memory.objection is not None:
            raise UnrepeatableError(memory.objection)
        self._attention = ops.attention
        self._kept = [*memory.kept, ops.scratch]
        self._attends: dict[tuple[int, Any], list[int]] = {}
        """Calls that a step's plan of attention goes to, by the group of the layer and its layout."""
        groups = batch.groups or (batch,)
        calls: list[tuple[Kernel, tuple[Any, ...]]] = []
        for kernel, arguments in seen:
            if not kernel.name.startswith(_REPEATABLE):
                raise UnrepeatableError(kernel.name)
            if kernel.name == _PLANS:
                continue
            if kernel.name.startswith("attend_"):
                if (plan := self._attention.planned(arguments[_ATTENTION])) is None:
                    raise UnrepeatableError("layers of very many kinds")
                place = next(place for place, group in enumerate(groups) if group is plan.batch)
                self._attends.setdefault((place, plan.layout), []).append(len(calls))
            calls.append((kernel, arguments))
        self._table = CallTable(ops.library, calls)
        self._batch: AttentionBatch | None = None
        self._plans: list[Plan] = []
        """What kernels are pointed to: kept while they may be called."""

    @property
    def num_bytes(self) -> int:
        """Of the memory that it keeps."""
        return sum(x.untyped_storage().nbytes() for x in self._kept)

    def repeat(self, batch: AttentionBatch, beginning: Callable[[], object]) -> Tensor:
        """Compute it for another step's contexts: `result`, where it then lies. Slots are not read from the batch.

        A batch that is given again is that of the last step: its tensors may hold other contexts now, if these are as
        many tiles long.
        beginning: is called right before the kernels, which leave Python's lock to others until they have ended.
        """
        if batch is not self._batch:
            self._read(batch)
        beginning()
        self._table.call()
        return self.result

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


class _Memory(TorchDispatchMode):
    """Keeps what torch makes, and notes the first thing that it does besides making room and looking at it anew.

    An embedding is noted among the kernels, as the one of ours that reads the same rows.
    """

    def __init__(self, ops: NativeOps, seen: Seen) -> None:
        super().__init__()
        self._ops, self._seen = ops, seen
        self.kept: list[Tensor] = []
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
            self.kept.append(out)
        elif func is _ATEN.embedding.default and args[1].dim() == 1:
            table, ids = args[:2]
            self.kept.append(out)
            self._seen.append(self._ops.moves.rows_call(table, ids, out))
        elif not (func.is_view and _is_same_memory(args[0], out)):
            self.objection = self.objection or str(func)
        return out


def _is_same_memory(x: Tensor, views: Tensor | Sequence[Tensor]) -> bool:
    """What torch calls a view may be a copy."""
    address = x.untyped_storage().data_ptr()
    return all(
        view.untyped_storage().data_ptr() == address for view in ([views] if isinstance(views, Tensor) else views)
    )

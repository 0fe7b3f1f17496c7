"""Which adapter is in which slot, and which of a step's tokens are computed with which slot.

    on the host   every adapter that is loaded       load (a thread of the engine's) ... drop
    in slots      those that steps computed with last, as many as a step may have

Before a step its adapters are brought into slots, over those that have not been in one for longest. The scheduler sees
to it that no step has more than there are slots. A captured step finds its tokens by slot in buffers of its own, and
factors where they always are, so that it serves any mixture of adapters.
Letters: kernels/ops.py, and S sequences, N tokens with an adapter.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aserve.core.ids import AdapterId, Row
from aserve.core.threads import in_thread_that_ends
from aserve.kernels.ops import LoraBatch
from aserve.models.lora import Factors, LoraLayers
from aserve.models.peft import inspect_adapter
from aserve.runner.device import Array, StepDevice
from aserve.runner.rows import RowTable
from aserve.runner.warm_up import BLANK

Ints = NDArray[np.int64]


class AdapterSlots:
    """The slots of a runner. Used by its thread alone, in launch order, but for `read`.

    version: another number whenever an adapter has come into a slot.
    """

    def __init__(self, layers: LoraLayers, rows: RowTable, device: StepDevice) -> None:
        self._layers = layers
        self._rows = rows
        self._device = device
        self._loaded: dict[AdapterId, Factors] = {}
        self._slots: dict[AdapterId, int] = {}
        """Least recently used first."""
        self._free = list(range(layers.num_slots))
        self.version = 0

    def read(self, adapter: AdapterId, folder: str) -> None:
        """Read an adapter into host memory. In any thread, before a plan has it. Raises `AdapterError`."""
        layers = self._layers
        inspected = inspect_adapter(Path(folder), layers.modules, layers.max_rank)
        self._loaded[adapter] = in_thread_that_ends(lambda: layers.read(inspected))

    def add_blank(self) -> None:
        """An adapter that changes nothing, under the id BLANK, for a warm-up. To be dropped."""
        self._loaded[BLANK] = self._layers.blank()

    def drop(self, adapter: AdapterId) -> None:
        """Forget it; its slot is free."""
        del self._loaded[adapter]
        if adapter in self._slots:
            self._free.append(self._slots.pop(adapter))

    def any_in(self, rows: Sequence[Row]) -> bool:
        """Whether one of these rows has an adapter."""
        adapters = self._rows.adapters
        return bool(adapters) and any(row in adapters for row in rows)

    def batch(self, rows_S: Ints, lens_S: Ints) -> LoraBatch | None:
        """Of sequences in batch order; None where none has an adapter."""
        rows = rows_S.tolist()
        if not self.any_in(rows):
            return None
        slots_T = np.repeat(self.slots_of(rows), lens_S)
        tokens_N, starts_G1 = by_slot(slots_T, self._layers.num_slots)
        return LoraBatch(*self._device.upload([tokens_N[: starts_G1[-1]], starts_G1]))

    def no_starts(self) -> Tensor:
        """A buffer for the offsets of a captured step, in which no token has an adapter."""
        device = self._rows.last_token_R.device
        return torch.zeros(self._layers.num_slots + 1, dtype=torch.int32, device=device)

    def load(self, buffers: LoraBatch, rows_S: Array, lens_S: Array) -> None:
        """Write to the buffers that a captured step reads; they have room for its tokens."""
        arrays = by_slot(np.repeat(self.slots_of(rows_S.tolist()), lens_S), self._layers.num_slots)
        tokens_N, starts_G1 = self._device.upload(arrays)
        buffers.tokens_N[: len(tokens_N)].copy_(tokens_N)
        buffers.starts_G1.copy_(starts_G1)

    def slots_of(self, rows: Sequence[Row]) -> Ints:
        """The slot of each row's adapter, brought there if need be; -1 for a row without one."""
        adapters = self._rows.adapters
        wanted = dict.fromkeys(adapters[row] for row in rows if row in adapters)
        assert len(wanted) <= self._layers.num_slots, f"a step has {len(wanted)} adapters"
        for adapter in wanted:
            if adapter in self._slots:
                self._slots[adapter] = self._slots.pop(adapter)  # the last in order is the last used
        for adapter in wanted:
            if adapter not in self._slots:
                self._bring(adapter)
        slots: Mapping[AdapterId, int] = self._slots
        return np.array([slots[adapters[row]] if row in adapters else -1 for row in rows], np.int64)

    def _bring(self, adapter: AdapterId) -> None:
        """Into a free slot, or that of the one that was used least recently, which is none of this step's."""
        if not self._free:
            self._free.append(self._slots.pop(next(iter(self._slots))))
        self._layers.put(self._free[-1], self._loaded[adapter])
        self._slots[adapter] = self._free.pop()
        self.version += 1


def by_slot(slots_T: Ints, num_slots: int) -> tuple[Array, Array]:
    """Tokens by slot, those without one last, int64; and where each slot's begin, and the last one's end, int32."""
    keys_T = np.where(slots_T < 0, num_slots, slots_T)
    starts_G1 = np.zeros(num_slots + 1, np.int32)
    np.cumsum(np.bincount(keys_T, minlength=num_slots + 1)[:num_slots], out=starts_G1[1:])
    return np.argsort(keys_T, kind="stable"), starts_G1

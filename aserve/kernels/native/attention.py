"""Attention by our own kernel: what a step's layers share is worked out once, and a call names the layer alone.

The kernel and its order of sums: src/attention.cpp.
"""

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from aserve.kernels.native.library import Library
from aserve.kernels.native.native_linear import with_dots
from aserve.kernels.ops import AttentionBatch

MAX_HEAD_DIM: Final = 256
TILE: Final = 256
"""Positions of a context that are taken together, as in attention_tiles.h. A plan holds for other contexts whose tiles
are the same: how far the last of them is seen is read when the kernel runs."""
_MAX_LAYER_KINDS: Final = 16
"""Layer groups times windows, so many of which are remembered for the layers of a step."""
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
CACHE_NAMES: Final = {
    (torch.float32, torch.float32): "f32",
    (torch.float32, torch.bfloat16): "f32_bf16",
    (torch.bfloat16, torch.bfloat16): "bf16",
}
"""What kernels that write or read a cache are called, by the types of queries and of the cache."""

Layout = tuple[int | None, int, Sequence[int], Sequence[int]]
"""Of a layer: its window, its heads, and shape and strides of its cache."""


class _Attention(ctypes.Structure):
    """`Attention` of attention_tiles.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("block_table", "seq_lens", "query_starts")),
        *((name, _INT) for name in ("num_seqs", "table_stride", "num_heads", "num_kv_heads", "head_dim")),
        *((name, _INT) for name in ("block_size", "block_stride", "slot_stride", "head_stride", "window")),
        *((name, _INT) for name in ("num_items", "num_partial_rows", "cost")),
    )


class _Item(ctypes.Structure):
    """`Item` of attention_tiles.h."""

    _fields_ = tuple(
        (name, ctypes.c_int32)
        for name in (
            "seq",
            "first_kv_head",
            "num_heads",
            "first_row",
            "num_rows",
            "first_tile",
            "end_tile",
            "partial",
            "num_partials",
        )
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """What the layers of a step read that have one layout, and who of the threads reads what.

    batch: what `attention` points into; kept, so that it stays where it is.
    """

    batch: AttentionBatch
    layout: Layout
    attention: _Attention
    items: Any
    partials: Tensor


class NativeAttention:
    """`Ops.attend` for the types of `CACHE_NAMES`. One instance serves one thread."""

    def __init__(self, library: Library) -> None:
        self._plan_attention = library.function("plan_attention", [ctypes.POINTER(_Attention), _POINTER, _INT])
        arguments = [ctypes.POINTER(_Attention), _POINTER, _POINTER, _INT, *[_POINTER] * 4, _FLOAT, _FLOAT]
        self._kernels = {
            dtypes: library.function(with_dots("attend", name), arguments) for dtypes, name in CACHE_NAMES.items()
        }
        self._planned: deque[Plan] = deque(maxlen=_MAX_LAYER_KINDS)

    def takes(self, q_THD: Tensor, k_cache_BPKD: Tensor, v_cache_BPKD: Tensor) -> bool:
        """Whether there is a kernel for these types, head size and layout."""
        return (
            (q_THD.dtype, k_cache_BPKD.dtype) in self._kernels
            and k_cache_BPKD.dtype == v_cache_BPKD.dtype
            and q_THD.shape[2] <= MAX_HEAD_DIM
            and k_cache_BPKD.stride() == v_cache_BPKD.stride()
            and k_cache_BPKD.stride(3) == 1
        )

    def attend(
        self,
        q_THD: Tensor,
        k_cache_BPKD: Tensor,
        v_cache_BPKD: Tensor,
        batch: AttentionBatch,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
    ) -> Tensor:
        """[T, H, D]. A token's heads lie one behind the other."""
        plan = self.plan(batch, (sliding_window, q_THD.shape[1], k_cache_BPKD.shape, k_cache_BPKD.stride()))
        out_THD = torch.empty_like(q_THD)
        self._kernels[q_THD.dtype, k_cache_BPKD.dtype](
            plan.attention,
            plan.items,
            q_THD.data_ptr(),
            q_THD.stride(0),
            k_cache_BPKD.data_ptr(),
            v_cache_BPKD.data_ptr(),
            out_THD.data_ptr(),
            plan.partials.data_ptr(),
            scale,
            soft_cap or 0.0,
        )
        return out_THD

    def plan(self, batch: AttentionBatch, layout: Layout) -> Plan:
        """As for the layers of this step before, if one had the same batch and layout."""
        for plan in self._planned:
            if plan.batch is batch and plan.layout == layout:
                return plan
        plan = self._deal(batch, layout)
        self._planned.append(plan)
        return plan

    def planned(self, attention: object) -> Plan | None:
        """The plan that a kernel was called with, if it is one of the latest."""
        return next((plan for plan in self._planned if plan.attention is attention), None)

    def _deal(self, batch: AttentionBatch, layout: Layout) -> Plan:
        """The work of a step, by threads."""
        sliding_window, num_heads, (_, block_size, num_kv_heads, head_dim), strides = layout
        attention = _Attention(
            batch.block_table_SM.data_ptr(),
            batch.seq_lens_S.data_ptr(),
            batch.query_starts_S1.data_ptr(),
            len(batch.seq_lens_S),
            batch.block_table_SM.stride(0),
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            *strides[:3],
            sliding_window or 0,
        )
        num_threads = torch.get_num_threads()
        self._plan_attention(attention, None, num_threads)
        items = (_Item * attention.num_items)()
        self._plan_attention(attention, items, num_threads)
        partial_stride = -(-head_dim // 32) * 32 + 16
        partials = torch.empty(attention.num_partial_rows, partial_stride)
        return Plan(batch, layout, attention, items, partials)

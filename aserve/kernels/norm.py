"""RMSNorm, and residual addition fused with it, in Triton. Twins: ReferenceOps.rms_norm and add_rms_norm.

Root mean square normalisation: Zhang and Sennrich, 2019. Both are bound by memory: each element is read once, kept in
registers as float32, and written once. Short rows (a head's, for q and k norms) share a program.
"""

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve.kernels.launch import SHAPES, Launch, let_next_start, wait_for_previous

_ELEMENTS_PER_PROGRAM = 2048


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    num_rows,
    x_token_stride,
    x_head_stride,
    residual_token_stride,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_previous(OVERLAPS)
    let_next_start(OVERLAPS)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_WIDTH)
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    out_offsets = rows[:, None] * WIDTH + columns[None, :]

    x_rows = rows // HEADS * x_token_stride + rows % HEADS * x_head_stride
    x = tl.load(x_ptr + x_rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual_offsets = rows[:, None] * residual_token_stride + columns[None, :]
        total = x + tl.load(residual_ptr + residual_offsets, mask=mask, other=0.0).to(tl.float32)
        total = total.to(out_ptr.dtype.element_ty)
        tl.store(total_ptr + out_offsets, total, mask=mask)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)
    weight = tl.load(weight_ptr + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    tl.store(out_ptr + out_offsets, (x * scale[:, None] * weight[None, :]).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension of [T, E] or [T, heads, E]; T and heads may be strided."""
    out_TE = torch.empty_like(x_TE, memory_format=torch.contiguous_format)
    if x_TE.shape[0]:
        _shaped(x_TE.shape, x_TE.stride(), 0, eps)(x_TE, None, weight_E, out_TE, None)
    return out_TE


def add_rms_norm(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual) for [T, E]."""
    out_TE = torch.empty_like(x_TE, memory_format=torch.contiguous_format)
    total_TE = torch.empty_like(x_TE, memory_format=torch.contiguous_format)
    if x_TE.shape[0]:
        launch = _shaped(x_TE.shape, x_TE.stride(), residual_TE.stride(0), eps)
        launch(x_TE, residual_TE, weight_E, out_TE, total_TE)
    return out_TE, total_TE


@lru_cache(maxsize=SHAPES)
def _shaped(shape: torch.Size, strides: tuple[int, ...], residual_stride: int, eps: float) -> Launch:
    """shape, strides: of x. residual_stride: 0 without one."""
    *rows, width = shape
    block_width = triton.next_power_of_2(width)
    block_rows = max(1, _ELEMENTS_PER_PROGRAM // block_width)
    num_rows, num_heads = math.prod(rows), math.prod(rows[1:])
    assert len(rows) == 1 or (len(rows) == 2 and not residual_stride), shape
    return Launch(
        _rms_norm_kernel,
        (triton.cdiv(num_rows, block_rows),),
        (num_rows, strides[0], strides[1] if len(rows) == 2 else 0, residual_stride, eps),
        overlaps=True,
        HEADS=num_heads,
        WIDTH=width,
        BLOCK_ROWS=block_rows,
        BLOCK_WIDTH=block_width,
        num_warps=min(max(block_rows * block_width // 512, 1), 16),
    )

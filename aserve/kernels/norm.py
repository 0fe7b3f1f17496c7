"""RMSNorm, and residual addition fused with it, in Triton. Twins: ReferenceOps.rms_norm and add_rms_norm.

Root mean square normalisation: Zhang and Sennrich, 2019. Both are bound by memory: each element is read once, kept in
registers as float32, and written once. Short rows (a head's, for q and k norms) share a program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

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
):
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
    out_TE = torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
    _launch(x_TE, None, weight_E, out_TE, None, eps)
    return out_TE


def add_rms_norm(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual) for [T, E]."""
    out_TE, total_TE = (torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device) for _ in range(2))
    _launch(x_TE, residual_TE, weight_E, out_TE, total_TE, eps)
    return out_TE, total_TE


def _launch(
    x: Tensor, residual: Tensor | None, weight_E: Tensor, out: Tensor, total: Tensor | None, eps: float
) -> None:
    assert x.ndim == 2 or (x.ndim == 3 and residual is None), x.shape
    width = x.shape[-1]
    num_rows = x.numel() // width
    if not num_rows:
        return
    block_width = triton.next_power_of_2(width)
    block_rows = max(1, _ELEMENTS_PER_PROGRAM // block_width)
    _rms_norm_kernel[(triton.cdiv(num_rows, block_rows),)](
        x,
        residual,
        weight_E,
        out,
        total,
        num_rows,
        x.stride(0),
        x.stride(1) if x.ndim == 3 else 0,
        residual.stride(0) if residual is not None else 0,
        eps,
        HEADS=x.shape[1] if x.ndim == 3 else 1,
        WIDTH=width,
        BLOCK_ROWS=block_rows,
        BLOCK_WIDTH=block_width,
        num_warps=min(max(block_rows * block_width // 512, 1), 16),
    )

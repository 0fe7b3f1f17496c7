"""SiLU and GELU (tanh form) of a gate, times up, in Triton. Twins: ReferenceOps.silu_and_mul and gelu_and_mul.

Bound by memory: gate and up, the two halves of a row, are read once and the product is written once.
"""

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from aserve.kernels.launch import SHAPES, Launch, let_next_start, wait_for_previous

_BLOCK = 1024


@triton.jit
def _gated_kernel(
    x_ptr,
    out_ptr,
    x_token_stride,
    WIDTH: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_previous(OVERLAPS)
    let_next_start(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    gate_ptr = x_ptr + token * x_token_stride
    gate = tl.load(gate_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        # 0.5 * (1 + tanh(u)) = sigmoid(2 u), with u = sqrt(2 / pi) * (gate + 0.044715 gate^3).
        activated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        activated = gate * tl.sigmoid(gate)
    tl.store(out_ptr + token * WIDTH + columns, (activated * up).to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up_TF2: Tensor) -> Tensor:
    """silu(x[:, :F]) * x[:, F:], [T, F]."""
    return _gated(gate_up_TF2, gelu=False)


def gelu_and_mul(gate_up_TF2: Tensor) -> Tensor:
    """gelu_tanh(x[:, :F]) * x[:, F:], [T, F]."""
    return _gated(gate_up_TF2, gelu=True)


def _gated(gate_up_TF2: Tensor, gelu: bool) -> Tensor:
    num_tokens, two_widths = gate_up_TF2.shape
    width = two_widths // 2
    out_TF = gate_up_TF2.new_empty_strided((num_tokens, width), (width, 1))  # faster than new_empty
    if num_tokens:
        _shaped(num_tokens, width, gate_up_TF2.stride(), gelu)(gate_up_TF2, out_TF)
    return out_TF


@lru_cache(maxsize=SHAPES)
def _shaped(num_tokens: int, width: int, strides: tuple[int, ...], gelu: bool) -> Launch:
    grid = (num_tokens, triton.cdiv(width, _BLOCK))
    return Launch(_gated_kernel, grid, strides[:1], overlaps=True, WIDTH=width, GELU=gelu, BLOCK=_BLOCK)

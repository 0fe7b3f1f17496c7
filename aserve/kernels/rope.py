"""Rotary embedding fused with the write of keys and values to the paged cache, and with norms of heads before it.

Twins: ReferenceOps.rope_and_write_kv, norm_rope_and_write_kv and write_kv. In Triton. One token is (1 + number of query
tiles) programs: the first turns and writes its keys and writes its values, the others turn query heads. A head is read
as two halves, [heads, D/2] each, since the pair of element i is i + D/2.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve.kernels.launch import SHAPES, Launch, wait_for_previous
from aserve.kernels.reference_fp8 import LARGEST

_HEADS_PER_PROGRAM = 8
_LARGEST_FP8 = tl.constexpr(LARGEST)


@triton.jit
def _within_fp8(x):
    """What is too large for float8 as its largest number; what is not a number stays so."""
    return tl.clamp(x.to(tl.float32), -_LARGEST_FP8, _LARGEST_FP8, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _turn_heads(
    src_ptr,
    dst_ptr,
    head_stride,
    first_head,
    num_heads,
    cos_sin_ptr,
    norm_ptr,
    eps,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Copy heads to contiguous dst, normed by the weights at norm_ptr and turned by the angles at cos_sin_ptr.

    Either may be None. Numbers are rounded to their type in between, as by a kernel for each, and to that of dst at the
    end: of float8, what is too large becomes the largest.
    """
    heads = first_head + tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, BLOCK_HALF)
    mask = (heads < num_heads)[:, None] & (dims < HALF)[None, :]
    src = src_ptr + heads[:, None] * head_stride + dims[None, :]
    dst = dst_ptr + heads[:, None] * (2 * HALF) + dims[None, :]
    first = tl.load(src, mask=mask, other=0.0)
    second = tl.load(src + HALF, mask=mask, other=0.0)
    if norm_ptr is not None:
        first32, second32 = first.to(tl.float32), second.to(tl.float32)
        squares = tl.sum(first32 * first32, axis=1) + tl.sum(second32 * second32, axis=1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        weight1 = tl.load(norm_ptr + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
        weight2 = tl.load(norm_ptr + HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
        first = (first32 * scale * weight1).to(first.dtype)
        second = (second32 * scale * weight2).to(second.dtype)
    if cos_sin_ptr is not None:
        cos = tl.load(cos_sin_ptr + dims, mask=dims < HALF, other=0.0)[None, :]
        sin = tl.load(cos_sin_ptr + HALF + dims, mask=dims < HALF, other=0.0)[None, :]
        first32, second32 = first.to(tl.float32), second.to(tl.float32)
        first = (first32 * cos - second32 * sin).to(first.dtype)
        second = (second32 * cos + first32 * sin).to(second.dtype)
    if dst_ptr.dtype.element_ty == tl.float8e4nv:
        first, second = _within_fp8(first), _within_fp8(second)
    tl.store(dst, first.to(dst_ptr.dtype.element_ty), mask=mask)
    tl.store(dst + HALF, second.to(dst_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _rope_kernel(
    q_ptr,
    out_ptr,
    k_ptr,
    v_ptr,
    cos_sin_ptr,
    positions_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    cos_sin_stride,
    slot_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    angles = None
    if cos_sin_ptr is not None:
        angles = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * cos_sin_stride
    if tile == 0:
        slot = tl.load(slots_ptr + token) * slot_stride
        k_src, v_src = k_ptr + token * k_token_stride, v_ptr + token * v_token_stride
        k_dst, v_dst = k_cache_ptr + slot, v_cache_ptr + slot
        _turn_heads(
            k_src, k_dst, k_head_stride, 0, NUM_KV_HEADS, angles, k_norm_ptr, eps, HALF, BLOCK_KV_HEADS, BLOCK_HALF
        )
        _turn_heads(v_src, v_dst, v_head_stride, 0, NUM_KV_HEADS, None, None, eps, HALF, BLOCK_KV_HEADS, BLOCK_HALF)
    elif q_ptr is not None:
        q_src, dst = q_ptr + token * q_token_stride, out_ptr + token * (NUM_HEADS * HALF * 2)
        head = (tile - 1) * BLOCK_HEADS
        _turn_heads(q_src, dst, q_head_stride, head, NUM_HEADS, angles, q_norm_ptr, eps, HALF, BLOCK_HEADS, BLOCK_HALF)


def rope_and_write_kv(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cos_sin_LD: Tensor,
    positions_T: Tensor,
    k_cache_BPKD: Tensor,
    v_cache_BPKD: Tensor,
    slots_T: Tensor,
) -> Tensor:
    """Rotate q and k, write k and v to their slots, return the rotated q, contiguous [T, H, D]."""
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    _launch(q_THD, out_THD, k_TKD, v_TKD, cos_sin_LD, positions_T, k_cache_BPKD, v_cache_BPKD, slots_T)
    return out_THD


def norm_rope_and_write_kv(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    q_norm_D: Tensor,
    k_norm_D: Tensor,
    eps: float,
    cos_sin_LD: Tensor,
    positions_T: Tensor,
    k_cache_BPKD: Tensor,
    v_cache_BPKD: Tensor,
    slots_T: Tensor,
) -> Tensor:
    """RMS-norm each head of q and k by itself, then as `rope_and_write_kv`: one kernel instead of three."""
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    norms = (q_norm_D, k_norm_D, eps)
    _launch(q_THD, out_THD, k_TKD, v_TKD, cos_sin_LD, positions_T, k_cache_BPKD, v_cache_BPKD, slots_T, norms)
    return out_THD


def write_kv(k_TKD: Tensor, v_TKD: Tensor, k_cache_BPKD: Tensor, v_cache_BPKD: Tensor, slots_T: Tensor) -> None:
    """Write k and v to their slots, as they are."""
    _launch(None, None, k_TKD, v_TKD, None, None, k_cache_BPKD, v_cache_BPKD, slots_T)


def _launch(
    q_THD: Tensor | None,
    out_THD: Tensor | None,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cos_sin_LD: Tensor | None,
    positions_T: Tensor | None,
    k_cache_BPKD: Tensor,
    v_cache_BPKD: Tensor,
    slots_T: Tensor,
    norms: tuple[Tensor | None, Tensor | None, float] = (None, None, 0.0),
) -> None:
    """norms: weights for the heads of q and of k, and the epsilon."""
    assert k_cache_BPKD.is_contiguous(), "a slot is a row of the flat cache"
    assert v_cache_BPKD.is_contiguous(), "a slot is a row of the flat cache"
    if not k_TKD.shape[0]:
        return
    q_norm_D, k_norm_D, eps = norms
    num_heads, q_strides = (q_THD.shape[1], q_THD.stride()) if q_THD is not None else (0, (0, 0))
    angle_stride = cos_sin_LD.stride(0) if cos_sin_LD is not None else 0
    launch = _shaped(k_TKD.shape, num_heads, q_strides, k_TKD.stride(), v_TKD.stride(), angle_stride, eps)
    launch(
        q_THD,
        out_THD,
        k_TKD,
        v_TKD,
        cos_sin_LD,
        positions_T,
        k_cache_BPKD,
        v_cache_BPKD,
        slots_T,
        q_norm_D,
        k_norm_D,
    )


@lru_cache(maxsize=SHAPES)
def _shaped(
    k_shape: torch.Size,
    num_heads: int,
    q_strides: tuple[int, ...],
    k_strides: tuple[int, ...],
    v_strides: tuple[int, ...],
    angle_stride: int,
    eps: float,
) -> Launch:
    """num_heads: of queries, 0 without any. angle_stride: of a position's cosines and sines, 0 without any."""
    num_tokens, num_kv_heads, head_dim = k_shape
    assert head_dim % 2 == 0, head_dim
    block_heads = min(_HEADS_PER_PROGRAM, triton.next_power_of_2(max(num_heads, 1)))
    slot_stride = num_kv_heads * head_dim
    return Launch(
        _rope_kernel,
        (num_tokens, 1 + triton.cdiv(num_heads, block_heads)),
        (eps, *q_strides[:2], *k_strides[:2], *v_strides[:2], angle_stride, slot_stride),
        overlaps=True,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK_HEADS=block_heads,
        BLOCK_KV_HEADS=triton.next_power_of_2(num_kv_heads),
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=4,
    )

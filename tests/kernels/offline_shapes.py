"""Compile every kernel for sm_90 in the head sizes and types that models have, and print what came of each as JSON.

Run in a process of its own (`python -m tests.kernels.offline_shapes PART...`, parts as in PARTS), for the reasons that
offline.py gives. `--thorough` takes every shape and not only the most usual, `--capability 89` another GPU.
"""

import argparse
import json
from collections import defaultdict

import torch
from triton.compiler import CompiledKernel

from aserve.core.columns import PenaltyColumns
from aserve.kernels.few_rows_linear import is_few
from aserve.kernels.fixed_ops import FixedOps
from aserve.kernels.ops import AttentionBatch, BadWords, LogitControls, LoraBatch, LoraWeights, TokenMasks
from aserve.kernels.reference_fp8 import FP8
from aserve.kernels.triton_ops import TritonOps
from tests.kernels.cases import sampling
from tests.kernels.machine_code import describe, describe_loop
from tests.kernels.offline import compile_only

BLOCK_SIZE = 16
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LIMITED = {"sliding_window": 1000, "soft_cap": 30.0}

HEADS = {64: (14, 2), 80: (32, 32), 128: (32, 8), 256: (8, 4)}
"""(query heads, key heads) by head dimension, as in Qwen2.5-0.5B, Phi-2, Llama-3.1-8B and Gemma-2."""
SHAPES = [(BF16, 128, {}), (BF16, 128, LIMITED)]
OTHER_SHAPES = [(BF16, 64, {}), (BF16, 256, {}), (BF16, 80, {}), (FP16, 64, {}), (FP32, 64, {}), (FP32, 256, {})]
STEPS = {
    "decode, alone": ([1], 8192),
    "decode, split": ([1] * 2, 8192),
    "decode": ([1] * 300, 64),
    "decode, crowded": ([1] * 56, 64),
    "short prompts": ([5, 3], 8192),
    "long prompts": ([700, 300], 8192),
}
"""(query lengths, longest context)."""
LIMITED_STEPS = ("decode", "long prompts")
"""Those that are compiled with a window and a cap too, of which the others differ as little as without."""
STEPS_OF_FLOAT8 = ("decode", "decode, split", "long prompts")
"""Likewise, with a cache of float8."""


def attend(
    ops: TritonOps,
    dtype: torch.dtype,
    head_dim: int,
    step: tuple[list[int], int],
    options: dict[str, float],
    cache_dtype: torch.dtype | None = None,
) -> None:
    """cache_dtype: of keys and values, if it is another."""
    query_lens, max_seq_len = step
    num_heads, num_kv_heads = HEADS[head_dim]
    num_tokens, num_seqs = sum(query_lens), len(query_lens)
    cache = torch.empty(2, BLOCK_SIZE, num_kv_heads, head_dim, dtype=cache_dtype or dtype)
    batch = AttentionBatch(
        num_decodes=query_lens.count(1),
        slots_T=torch.zeros(num_tokens, dtype=torch.int64),
        block_table_SM=torch.zeros(num_seqs, max_seq_len // BLOCK_SIZE, dtype=torch.int32),
        seq_lens_S=torch.zeros(num_seqs, dtype=torch.int32),
        query_starts_S1=torch.zeros(num_seqs + 1, dtype=torch.int32),
        max_query_len=max(query_lens),
        max_seq_len=max_seq_len,
    )
    qkv = torch.empty(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    cos_sin, positions = torch.empty(9, head_dim), torch.zeros(num_tokens, dtype=torch.int64)
    norm = torch.empty(head_dim, dtype=dtype)
    if isinstance(ops, FixedOps):  # whose rope is that of the others
        q = q.contiguous()
    else:
        ops.norm_rope_and_write_kv(q, k, v, norm, norm, 1e-6, cos_sin, positions, cache, cache, batch.slots_T)
        q = ops.rope_and_write_kv(q, k, v, cos_sin, positions, cache, cache, batch.slots_T)
        ops.write_kv(k, v, cache, cache, batch.slots_T)
    ops.attend(q, cache, cache, batch, scale=0.1, **options)


def elementwise(ops: TritonOps, dtype: torch.dtype, width: int) -> None:
    x, weight = torch.empty(3, width, dtype=dtype), torch.empty(width, dtype=dtype)
    ops.rms_norm(x, weight, 1e-6)
    ops.add_rms_norm(x, x, weight, 1e-6)
    ops.silu_and_mul(x)
    ops.gelu_and_mul(x)


def sample(ops: TritonOps, vocab_size: int) -> None:
    for options in (
        {"temperature": 0.0},
        {},
        {"top_k": 5},
        {"banned": [[1, 2]] * 3},
        {"min_p": 0.1, "banned": [[1]] * 3},
    ):
        for dtype in (BF16, FP32):
            ops.sample(torch.empty(3, vocab_size, dtype=dtype), sampling(3, **options))


def control(ops: TritonOps, vocab_size: int) -> None:
    """Every control, then none but a ban."""
    one_Q, row_Q = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    penalties = PenaltyColumns(one_Q, one_Q, one_Q)
    banned_QC, words_WM = torch.zeros(1, 3, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64)
    words = BadWords(words_WM, torch.zeros(2, dtype=torch.int64), torch.zeros(1, 9, dtype=torch.int64))
    counts_RV, bias_RV = torch.zeros(4, vocab_size, dtype=torch.int32), torch.zeros(4, vocab_size)
    logits_SV = torch.empty(2, vocab_size)
    for tables in (
        (bias_RV, counts_RV, penalties, None, words),
        (None, None, penalties, banned_QC, None),
    ):
        ops.control_logits(logits_SV, LogitControls(row_Q, row_Q, *tables))


def mask(ops: TritonOps, vocab_size: int) -> None:
    words_QW = torch.zeros(2, -(-vocab_size // 32), dtype=torch.int32)
    ops.mask_logits(torch.empty(2, vocab_size), TokenMasks(torch.zeros(2, dtype=torch.int64), words_QW))


def adapt(ops: TritonOps, dtype: torch.dtype, rank: int) -> None:
    """Eight adapters of Qwen2.5-0.5B's first projections, which have outputs of three sizes."""
    sizes, num_inputs, num_adapters = (896, 128, 100), 896, 8
    weights = LoraWeights(
        torch.empty(num_adapters, len(sizes), num_inputs, rank, dtype=dtype),
        torch.empty(num_adapters, rank, sum(sizes), dtype=dtype),
        torch.zeros(num_adapters, dtype=torch.int32),
        sizes,
    )
    batch = LoraBatch(torch.zeros(40, dtype=torch.int64), torch.zeros(num_adapters + 1, dtype=torch.int32))
    ops.add_lora(torch.empty(40, sum(sizes), dtype=dtype), torch.empty(40, num_inputs, dtype=dtype), weights, batch)


def multiply(ops: TritonOps, dtype: torch.dtype, num_rows: int) -> None:
    """Layers of Llama-3.1-8B, whose sums are whole, split, and of tall tiles; gated; and one that no tile divides."""
    x_TI, weight_OI = torch.empty(num_rows, 4096, dtype=dtype), torch.empty(6144, 4096, dtype=dtype)
    for layer_OI in (weight_OI, weight_OI[:4096], torch.empty(28672, 4096, dtype=dtype)):
        ops.linear(x_TI, layer_OI, None)
        ops.linear(x_TI, layer_OI, layer_OI[:, 0].contiguous())
    ops.linear_silu_and_mul(x_TI, weight_OI, None)
    weight_OI = torch.empty(1000, 100, dtype=dtype)
    ops.linear(x_TI[:, :100], weight_OI, weight_OI[:, 0].contiguous())


def multiply_fp8(ops: TritonOps, num_rows: int) -> None:
    """Layers of Llama-3.1-8B in float8, by our own kernels: as `multiply`; torch has those that are not few."""
    x_TI, scale_O = torch.empty(num_rows, 4096, dtype=BF16), torch.empty(28672)
    weight_OI = torch.empty(28672, 4096, dtype=BF16).to(FP8)
    for num_outputs in (4096, 6144, 28672):
        if num_rows <= 2 or is_few(x_TI, weight_OI[:num_outputs], 132):
            ops.linear(x_TI, weight_OI[:num_outputs], None, scale_O[:num_outputs])
    if num_rows <= 2:
        ops.linear_silu_and_mul(x_TI, weight_OI, None, scale_O)


def move_blocks(ops: TritonOps, dtype: torch.dtype, numbers: int) -> None:
    planes_YBX, packed_NYX = torch.empty(4, 3, numbers, dtype=dtype), torch.empty(2, 4, numbers, dtype=dtype)
    ids_N = torch.zeros(2, dtype=torch.int64)
    ops.copy_blocks(planes_YBX, ids_N, ids_N)
    ops.gather_blocks(planes_YBX, ids_N, packed_NYX)
    ops.scatter_blocks(packed_NYX, planes_YBX, ids_N)


def run_attention(job: "Job") -> None:
    for dtype, head_dim, options in job.shapes:
        for name, step in STEPS.items():
            if options and name not in LIMITED_STEPS and not job.thorough:
                continue
            attend(job.ops, dtype, head_dim, step, options)
            job.report(loops=not options, dtype=str(dtype), head_dim=head_dim, step=name, **options)
    for name in STEPS if job.thorough else STEPS_OF_FLOAT8:
        attend(job.ops, BF16, 128, STEPS[name], {}, FP8)
        job.report(loops=True, dtype=str(BF16), head_dim=128, step=f"{name} of float8")


def run_fixed(job: "Job") -> None:
    ops = FixedOps(num_sms=132, capability=job.capability)
    for dtype, head_dim, options in job.shapes:
        for name in ("decode", "long prompts"):
            attend(ops, dtype, head_dim, STEPS[name], options)
            job.report(dtype=str(dtype), head_dim=head_dim, step=name, **options)
    for dtype in job.dtypes:
        weight_OI = torch.empty(200, 896, dtype=dtype)
        for bias_O in (None, weight_OI[:, 0].contiguous()):
            ops.linear(torch.empty(3, 896, dtype=dtype), weight_OI, bias_O)
            job.report(dtype=str(dtype), bias=bias_O is not None)
        ops.linear(torch.empty(3, 896, dtype=dtype), weight_OI.to(FP8), None, torch.empty(200))
        job.report(dtype=str(dtype), weight="float8")


def run_others(job: "Job") -> None:
    for dtype in job.dtypes:
        for width in (80, 5120):
            elementwise(job.ops, dtype, width)
            job.report(dtype=str(dtype), width=width)
        for num_rows in (1, 2, 3, 64):
            multiply(job.ops, dtype, num_rows)
            job.report(loops=num_rows > 2, dtype=str(dtype), step=f"{num_rows} rows")
        for num_rows in (1, 2, 3, 64, 128) if dtype is BF16 else ():
            multiply_fp8(job.ops, num_rows)
            job.report(loops=num_rows > 2, dtype=str(dtype), step=f"{num_rows} rows of float8")
        for rank in (16, 256):
            adapt(job.ops, dtype, rank)
            job.report(dtype=str(dtype), rank=rank)
    for vocab_size in (50257, 151936) if job.thorough else (151936,):
        sample(job.ops, vocab_size)
        control(job.ops, vocab_size)
        mask(job.ops, vocab_size)
        job.ops.score(torch.zeros(2, vocab_size), torch.zeros(2, dtype=torch.int64), num_top=0)
        job.report(vocab_size=vocab_size)
    for dtype, numbers in ((BF16, 16384), (FP32, 640)):
        move_blocks(job.ops, dtype, numbers)
        job.report(dtype=str(dtype), numbers=numbers)


PARTS = {"attention": run_attention, "fixed": run_fixed, "others": run_others}


class Job:
    """What to compile for, and what has come of it."""

    def __init__(self, capability: tuple[int, int], thorough: bool) -> None:
        self.capability, self.thorough = capability, thorough
        self.ops = TritonOps(num_sms=132, capability=capability)
        self.shapes = SHAPES + OTHER_SHAPES * thorough
        self.dtypes = (BF16, FP16, FP32) if thorough else (BF16,)
        self._compiled: dict[str, dict[int, CompiledKernel]] = defaultdict(dict)
        self._reported: set[int] = set()
        compile_only(self._compiled, 10 * capability[0] + capability[1])

    def report(self, *, loops: bool = False, **shape: object) -> None:
        """A line for each kernel that was compiled since the last report. loops: with figures of its inner loop."""
        for name, kernels in self._compiled.items():
            for key in kernels.keys() - self._reported:
                self._reported.add(key)
                figures = describe(kernels[key]) | (describe_loop(kernels[key]) if loops else {})
                print(json.dumps({"kernel": name, **shape, **figures}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--thorough", action="store_true")
    parser.add_argument("--capability", default="90")
    arguments = parser.parse_args()
    job = Job((int(arguments.capability[0]), int(arguments.capability[1])), arguments.thorough)
    for part in arguments.parts:
        PARTS[part](job)


if __name__ == "__main__":
    main()

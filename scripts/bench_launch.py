"""Microseconds of Python that an operation on CUDA takes up to the driver's launch: as it is, and by Triton's own way.

    python scripts/bench_launch.py     on any machine: kernels are compiled for sm_90, for a driver without a device

Tensors are on the CPU, and nothing is computed. The ways take turns in one process, so that their ratio holds on a busy
machine too. One JSON line an operation:

    us, us_by_triton    the operation, with its launches as they are, and as Triton makes them
    us_besides          without any launch: what it allocates, and looks up
    ratio               of the operation;  launch_ratio, of its launches alone
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from no_device import use_no_device
from report import emit

from aserve.core.columns import SamplingColumns
from aserve.kernels.launch import Launch
from aserve.kernels.ops import AttentionBatch, SamplingBatch
from aserve.kernels.triton_ops import TritonOps

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, HIDDEN, VOCAB = 32, 8, 128, 16, 4096, 128256
DTYPE = torch.bfloat16
ROUNDS, CALLS = 21, 200

Call = Callable[[], object]


def attention(ops: TritonOps, query_lens: list[int], max_seq_len: int) -> Call:
    num_tokens, num_seqs = sum(query_lens), len(query_lens)
    cache = torch.empty(4, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=DTYPE)
    batch = AttentionBatch(
        num_decodes=query_lens.count(1),
        slots_T=torch.zeros(num_tokens, dtype=torch.int64),
        block_table_SM=torch.zeros(num_seqs, -(-max_seq_len // BLOCK_SIZE), dtype=torch.int32),
        seq_lens_S=torch.zeros(num_seqs, dtype=torch.int32),
        query_starts_S1=torch.zeros(num_seqs + 1, dtype=torch.int32),
        max_query_len=max(query_lens),
        max_seq_len=max_seq_len,
    )
    q = torch.empty(num_tokens, HEADS, HEAD_DIM, dtype=DTYPE)
    return lambda: ops.attend(q, cache, cache, batch, scale=0.1)


def sampling(ops: TritonOps, num_rows: int, temperature: float, top_p: float) -> Call:
    def rows(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype)

    batch = SamplingBatch(
        columns_S=SamplingColumns(
            temperature=rows(temperature, torch.float32),
            top_k=rows(0, torch.int32),
            top_p=rows(top_p, torch.float32),
            min_p=rows(0.0, torch.float32),
            seed=torch.arange(num_rows),
        ),
        positions_S=torch.arange(num_rows),
        banned_SC=None,
        all_greedy=temperature == 0,
        any_filter=top_p < 1,
    )
    logits = torch.empty(num_rows, VOCAB)
    return lambda: ops.sample(logits, batch)


def calls(ops: TritonOps) -> dict[str, Call]:
    """Each operation of a step of Llama-3.1-8B."""
    num_tokens = 64
    x, weight = torch.empty(num_tokens, HIDDEN, dtype=DTYPE), torch.empty(HIDDEN, dtype=DTYPE)
    qkv = torch.empty(num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=DTYPE)
    q, k, v = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
    cache = torch.empty(4, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=DTYPE)
    packed = torch.zeros(2 * num_tokens, dtype=torch.int64)
    positions, slots = packed[:num_tokens], packed[num_tokens:]
    cos_sin = torch.empty(99, HEAD_DIM)
    return {
        "rms_norm": lambda: ops.rms_norm(x, weight, 1e-6),
        "add_rms_norm": lambda: ops.add_rms_norm(x, x, weight, 1e-6),
        "silu_and_mul": lambda: ops.silu_and_mul(x),
        "rope_and_write_kv": lambda: ops.rope_and_write_kv(q, k, v, cos_sin, positions, cache, cache, slots),
        "attend, 64 decode": attention(ops, [1] * 64, 1024),
        "attend, 1 decode, split": attention(ops, [1], 8192),
        "attend, prompt of 100": attention(ops, [100], 100),
        "attend, 8 decode beside a prompt": attention(ops, [1] * 8 + [500], 1024),
        "sample, greedy": sampling(ops, 64, 0.0, 1.0),
        "sample, top_p": sampling(ops, 64, 1.0, 0.9),
    }


WAYS: dict[str, Callable[..., None]] = {
    "us": Launch.__call__,
    "us_by_triton": lambda launch, *tensors: launch.launch_by_triton(tensors),
    "us_besides": lambda launch, *tensors: None,
}


def microseconds(call: Call, way: str) -> float:
    setattr(Launch, "__call__", WAYS[way])  # noqa: B010  (an assignment to a method is no valid type)
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return 1e6 * (time.perf_counter() - begin) / CALLS


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    use_no_device()
    for name, call in calls(TritonOps(num_sms=132)).items():
        call()
        rounds = [{way: microseconds(call, way) for way in WAYS} for _ in range(ROUNDS)]
        figures = {way: statistics.median(one[way] for one in rounds) for way in WAYS}
        us, us_by_triton, us_besides = figures["us"], figures["us_by_triton"], figures["us_besides"]
        ratios = {"ratio": us / us_by_triton, "launch_ratio": (us - us_besides) / (us_by_triton - us_besides)}
        emit("launch", {"operation": name}, figures | ratios)


if __name__ == "__main__":
    main()

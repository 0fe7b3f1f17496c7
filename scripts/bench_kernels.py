"""GB/s and TFLOP/s of each kernel, and their share of what this device's memory copy and matrix product reach.

    python scripts/bench_kernels.py             on a CUDA device, bfloat16
    python scripts/bench_kernels.py --dry-run   anywhere: the CPU's operations on tiny shapes, to prove the script

Calls are captured in a CUDA graph, so that launching is not timed, and go round copies of their inputs that together
exceed the caches, as the layers of a model do. Bytes are those that must move: each input read once, each output
written once. One JSON line a case; `copy_share` and `matmul_share` are against the first two lines.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from report import emit
from torch import Tensor

from aserve.core.columns import SamplingColumns
from aserve.kernels.dispatch import select_ops
from aserve.kernels.ops import AttentionBatch, Fp8Ops, HeadNormOps, LinearOps, Ops, SamplingBatch

BLOCK_SIZE = 16
LARGEST_COPIES = 32
REPEATS = 4
"""Of the copies in a round, so that its one launch weighs little."""
ROUNDS = 7

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A kernel on a shape. `make` builds fresh inputs and returns the call, which moves num_bytes and does flops."""

    kernel: str
    config: dict[str, object]
    make: Callable[[], Call]
    num_bytes: int
    flops: int = 0


@dataclass(frozen=True)
class Sizes:
    """What is measured, as (batch, context) and the like."""

    heads: tuple[int, int, int]
    hidden: int
    intermediate: int
    vocab: int
    tokens: Sequence[int]
    decodes: Sequence[tuple[int, int]]
    prefills: Sequence[tuple[int, int, int]]
    """(sequences, query tokens, context) each."""
    rows: Sequence[int]
    thin_rows: Sequence[int]
    """Of products by ops of their own, also of weights in float8, beside torch's."""
    linears: Sequence[tuple[int, int]]
    """(inputs, outputs) of those."""
    copy_elements: int
    matmul_size: int
    cold_bytes: int


LLAMA_8B = Sizes(
    heads=(32, 8, 128),
    hidden=4096,
    intermediate=14336,
    vocab=151936,
    tokens=(1, 256, 8192),
    decodes=(
        *((batch, 4096) for batch in (1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 33, 48, 49, 50, 64)),
        *((batch, 1024) for batch in (1, 32, 64, 99, 100, 128, 256)),
        (1, 16384),
    ),
    prefills=((1, 512, 512), (1, 2048, 2048), (1, 4096, 4096), (1, 8192, 8192), (8, 1024, 1024), (1, 1024, 8192)),
    rows=(1, 32, 256),
    thin_rows=(1, 2, 8, 32, 256),
    linears=(
        *((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)),
        *((2560, 6144), (4096, 2560), (2560, 19456), (9728, 2560)),  # Qwen3-4B's
        (2048, 1024),
    ),
    copy_elements=2**29,
    matmul_size=8192,
    cold_bytes=2**28,
)
TINY = Sizes(
    heads=(4, 2, 16),
    hidden=64,
    intermediate=96,
    vocab=500,
    tokens=(3,),
    decodes=((1, 40), (3, 70)),
    prefills=((1, 20, 20), (2, 10, 40)),
    rows=(2,),
    thin_rows=(1,),
    linears=((64, 96),),
    copy_elements=2**16,
    matmul_size=64,
    cold_bytes=2**12,
)


class Bench:
    """The cases of one device, type and set of sizes."""

    def __init__(self, ops: Ops, device: torch.device, dtype: torch.dtype, sizes: Sizes) -> None:
        self._ops, self._device, self._dtype, self._sizes = ops, device, dtype, sizes

    def cases(self) -> Iterator[Case]:
        """Ceilings first: the shares of the others are against them."""
        yield self._copy()
        yield self._matmul()
        for num_tokens in self._sizes.tokens:
            yield from self._elementwise(num_tokens)
        for batch, context in self._sizes.decodes:
            yield self._attention("decode_attention", batch, 1, context)
        for num_seqs, num_queries, context in self._sizes.prefills:
            yield self._attention("prefill_attention", num_seqs, num_queries, context)
        for num_rows in self._sizes.thin_rows:
            for num_inputs, num_outputs in self._sizes.linears:
                yield from self._linear(num_rows, num_inputs, num_outputs)
        for num_rows in self._sizes.rows:
            for name, temperature, top_k, top_p in (
                ("greedy", 0.0, 0, 1.0),
                ("temperature", 1.0, 0, 1.0),
                ("top_k", 1.0, 50, 1.0),
                ("top_p", 1.0, 0, 0.9),
            ):
                yield self._sample(num_rows, name, temperature, top_k, top_p)

    def _linear(self, num_rows: int, num_inputs: int, num_outputs: int) -> Iterator[Case]:
        config: dict[str, object] = {"tokens": num_rows, "inputs": num_inputs, "outputs": num_outputs}
        products: dict[str, Callable[..., Tensor]] = {"torch_linear": F.linear}
        if isinstance(self._ops, LinearOps):
            products["linear"] = self._ops.linear
        num_weights = num_inputs * num_outputs
        flops = 2 * num_rows * num_weights
        for name, product in products.items():

            def make(product: Callable[..., Tensor] = product) -> Call:
                x, weight = self._randn(num_rows, num_inputs), self._randn(num_outputs, num_inputs)
                return lambda: product(x, weight, None)

            yield Case(name, config, make, self._bytes(num_weights), flops)
        if isinstance(ops := self._ops, Fp8Ops):

            def make_fp8() -> Call:
                x, layer = self._randn(num_rows, num_inputs), ops.quantize_weight(self._randn(num_outputs, num_inputs))
                return lambda: ops.linear(x, layer[0], None, layer[1])

            yield Case("fp8_linear", config, make_fp8, num_weights, flops)

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self._device, dtype=self._dtype)

    def _bytes(self, num_elements: int) -> int:
        return num_elements * self._dtype.itemsize

    def _copy(self) -> Case:
        num_elements = self._sizes.copy_elements

        def make() -> Call:
            source = self._randn(num_elements)
            target = torch.empty_like(source)
            return lambda: target.copy_(source)

        return Case("copy", {"elements": num_elements}, make, 2 * self._bytes(num_elements))

    def _matmul(self) -> Case:
        size = self._sizes.matmul_size

        def make() -> Call:
            a, b = self._randn(size, size), self._randn(size, size)
            return lambda: a @ b

        return Case("matmul", {"size": size}, make, 3 * self._bytes(size * size), 2 * size**3)

    def _elementwise(self, num_tokens: int) -> Iterator[Case]:
        hidden, intermediate = self._sizes.hidden, self._sizes.intermediate

        def norm() -> Call:
            x, weight = self._randn(num_tokens, hidden), self._randn(hidden)
            return lambda: self._ops.rms_norm(x, weight, 1e-6)

        def add_norm() -> Call:
            x, residual, weight = self._randn(num_tokens, hidden), self._randn(num_tokens, hidden), self._randn(hidden)
            return lambda: self._ops.add_rms_norm(x, residual, weight, 1e-6)

        def silu() -> Call:
            gate_up = self._randn(num_tokens, 2 * intermediate)
            return lambda: self._ops.silu_and_mul(gate_up)

        config: dict[str, object] = {"tokens": num_tokens}
        yield Case("rms_norm", config, norm, self._bytes(2 * num_tokens * hidden))
        yield Case("add_rms_norm", config, add_norm, self._bytes(4 * num_tokens * hidden))
        yield Case("silu_and_mul", config, silu, self._bytes(3 * num_tokens * intermediate))
        num_heads, num_kv_heads, head_dim = self._sizes.heads
        moved = 2 * num_tokens * (num_heads + 2 * num_kv_heads) * head_dim
        yield Case("rope_and_write_kv", config, lambda: self._rope(num_tokens), self._bytes(moved))
        if isinstance(self._ops, HeadNormOps):
            fused = self._ops.norm_rope_and_write_kv
            yield Case("norm_rope_and_write_kv", config, lambda: self._rope(num_tokens, fused), self._bytes(moved))

    def _rope(self, num_tokens: int, fused: Callable[..., Tensor] | None = None) -> Call:
        """fused: with norms of heads before it."""
        num_heads, num_kv_heads, head_dim = self._sizes.heads
        qkv = self._randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
        q, k, v = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        k_cache, v_cache = (self._cache(-(-num_tokens // BLOCK_SIZE)) for _ in range(2))
        cos_sin = torch.randn(num_tokens, head_dim, device=self._device)
        positions = torch.arange(num_tokens, device=self._device)
        slots = torch.randperm(num_tokens, device=self._device)
        if fused is not None:
            norms = self._randn(head_dim), self._randn(head_dim), 1e-6
            return lambda: fused(q, k, v, *norms, cos_sin, positions, k_cache, v_cache, slots)
        return lambda: self._ops.rope_and_write_kv(q, k, v, cos_sin, positions, k_cache, v_cache, slots)

    def _cache(self, num_blocks: int) -> Tensor:
        _, num_kv_heads, head_dim = self._sizes.heads
        return self._randn(num_blocks, BLOCK_SIZE, num_kv_heads, head_dim)

    def _attention(self, kernel: str, num_seqs: int, num_queries: int, context: int) -> Case:
        num_heads, num_kv_heads, head_dim = self._sizes.heads
        num_tokens = num_seqs * num_queries
        blocks_per_seq = -(-context // BLOCK_SIZE)

        def make() -> Call:
            q = self._randn(num_tokens, num_heads, head_dim)
            k_cache, v_cache = (self._cache(num_seqs * blocks_per_seq) for _ in range(2))
            table = torch.randperm(num_seqs * blocks_per_seq, dtype=torch.int32, device=self._device)
            batch = AttentionBatch(
                num_decodes=num_seqs if num_queries == 1 else 0,
                slots_T=torch.zeros(num_tokens, dtype=torch.int64, device=self._device),
                block_table_SM=table.view(num_seqs, blocks_per_seq),
                seq_lens_S=torch.full((num_seqs,), context, dtype=torch.int32, device=self._device),
                query_starts_S1=torch.arange(num_seqs + 1, dtype=torch.int32, device=self._device) * num_queries,
                max_query_len=num_queries,
                max_seq_len=context,
            )
            return lambda: self._ops.attend(q, k_cache, v_cache, batch, scale=head_dim**-0.5)

        config: dict[str, object] = {"seqs": num_seqs, "queries": num_queries, "context": context}
        pairs = num_seqs * (num_queries * context - num_queries * (num_queries - 1) // 2)
        moved = 2 * num_seqs * context * num_kv_heads * head_dim + 2 * num_tokens * num_heads * head_dim
        return Case(kernel, config, make, self._bytes(moved), 4 * pairs * num_heads * head_dim)

    def _sample(self, num_rows: int, name: str, temperature: float, top_k: int, top_p: float) -> Case:
        def rows(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((num_rows,), value, dtype=dtype, device=self._device)

        def make() -> Call:
            logits = 4 * torch.randn(num_rows, self._sizes.vocab, device=self._device)
            batch = SamplingBatch(
                columns_S=SamplingColumns(
                    temperature=rows(temperature, torch.float32),
                    top_k=rows(top_k, torch.int32),
                    top_p=rows(top_p, torch.float32),
                    min_p=rows(0.0, torch.float32),
                    seed=torch.arange(num_rows, device=self._device),
                ),
                positions_S=torch.arange(num_rows, device=self._device),
                banned_SC=None,
                all_greedy=temperature == 0,
                any_filter=top_k > 0 or top_p < 1,
            )
            return lambda: self._ops.sample(logits, batch)

        return Case("sample", {"rows": num_rows, "how": name}, make, 4 * num_rows * self._sizes.vocab)


def seconds_a_call(case: Case, device: torch.device, cold_bytes: int) -> float:
    """The median over rounds, each over all copies of the inputs."""
    calls = [case.make() for _ in range(min(LARGEST_COPIES, max(2, -(-cold_bytes // case.num_bytes))))]
    calls_a_round = calls * REPEATS
    run_all = _graph(calls_a_round) if device.type == "cuda" else lambda: [call() for call in calls_a_round]
    run_all()
    times = []
    for _ in range(ROUNDS):
        _wait(device)
        begin = time.perf_counter()
        run_all()
        _wait(device)
        times.append((time.perf_counter() - begin) / len(calls_a_round))
    return statistics.median(times)


def _graph(calls: list[Call]) -> Call:
    """The calls as a CUDA graph."""
    calls[0]()  # compiles, which a capture cannot
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    dry_run = parser.parse_args().dry_run
    device = torch.device("cpu" if dry_run else "cuda")
    dtype = torch.float32 if dry_run else torch.bfloat16
    sizes = TINY if dry_run else LLAMA_8B
    torch.manual_seed(0)
    ceilings: dict[str, float] = {}
    for case in Bench(select_ops(device), device, dtype, sizes).cases():
        seconds = seconds_a_call(case, device, sizes.cold_bytes)
        gb_per_s, tflop_per_s = case.num_bytes / seconds / 1e9, case.flops / seconds / 1e12
        if case.kernel in ("copy", "matmul"):
            ceilings[case.kernel] = gb_per_s if case.kernel == "copy" else tflop_per_s
        figures = {"us": seconds * 1e6, "gb_per_s": gb_per_s, "tflop_per_s": tflop_per_s}
        figures["copy_share"] = gb_per_s / ceilings["copy"]
        if "matmul" in ceilings:
            figures["matmul_share"] = tflop_per_s / ceilings["matmul"]
        emit("kernels", {"kernel": case.kernel, **case.config}, figures)


if __name__ == "__main__":
    main()

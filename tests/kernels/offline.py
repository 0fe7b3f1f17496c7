"""Compile the kernels for an H100 or H200 (sm_90) on a machine without one, and print what came of it, as JSON lines.

Run in a process of its own (`python -m tests.kernels.offline`): it puts a driver without a device into Triton, and has
each launch compile only. `variants` counts a kernel's compilations over steps of many sizes, lengths and alignments.
"""

import json
import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from aserve.kernels.ops import AttentionBatch
from aserve.kernels.triton_ops import TritonOps
from scripts.no_device import use_no_device
from tests.kernels.cases import sampling

OPS = TritonOps(num_sms=132)
DTYPE = torch.bfloat16
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16


def compile_only(compiled: dict[str, dict[int, CompiledKernel]], arch: int = 90) -> None:
    """Triton's launches compile, and are collected by kernel name. Remembered ones do nothing."""
    launch = JITFunction.run

    def run(self: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> CompiledKernel:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        compiled[self.__name__][id(kernel)] = kernel
        return kernel

    JITFunction.run = run
    use_no_device(arch)


def attend(num_decodes: int, prefill_lens: list[int], max_seq_len: int, **options: float) -> None:
    num_seqs = num_decodes + len(prefill_lens)
    num_tokens = num_decodes + sum(prefill_lens)
    cache = torch.empty(4, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=DTYPE)
    batch = AttentionBatch(
        num_decodes=num_decodes,
        slots_T=torch.zeros(num_tokens, dtype=torch.int64),
        block_table_SM=torch.zeros(num_seqs, -(-max_seq_len // BLOCK_SIZE), dtype=torch.int32),
        seq_lens_S=torch.zeros(num_seqs, dtype=torch.int32),
        query_starts_S1=torch.zeros(num_seqs + 1, dtype=torch.int32),
        max_query_len=max([1, *prefill_lens]),
        max_seq_len=max_seq_len,
    )
    OPS.attend(torch.empty(num_tokens, HEADS, HEAD_DIM, dtype=DTYPE), cache, cache, batch, scale=0.1, **options)


def elementwise(num_tokens: int) -> None:
    x, weight = torch.empty(num_tokens, 4096, dtype=DTYPE), torch.empty(4096, dtype=DTYPE)
    OPS.add_rms_norm(x, x, weight, 1e-6)
    OPS.silu_and_mul(x)
    qkv = torch.empty(num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=DTYPE)
    q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    cache = torch.empty(4, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=DTYPE)
    packed = torch.zeros(2 * num_tokens, dtype=torch.int64)  # positions and slots in one buffer, as they are copied
    OPS.rope_and_write_kv(q, k, v, torch.empty(99, HEAD_DIM), packed[:num_tokens], cache, cache, packed[num_tokens:])


def sample(num_rows: int, num_banned: int) -> None:
    batch = sampling(num_rows, top_p=0.9, banned=[[-1] * num_banned] * num_rows)
    OPS.sample(torch.empty(num_rows, 151936), batch)


STEPS: list[Callable[[], None]] = [
    lambda: attend(1, [], 1500),
    lambda: attend(2, [], 16001),
    lambda: attend(13, [], 100_000),
    lambda: attend(256, [], 16),
    lambda: attend(256, [], 5000),
    lambda: attend(257, [100], 77),
    lambda: attend(258, [200, 65], 4096),
    lambda: attend(259, [4096], 4096),
    lambda: elementwise(1),
    lambda: elementwise(3),
    lambda: elementwise(64),
    lambda: sample(1, 1),
    lambda: sample(7, 16),
]


def spilled_bytes(kernel: CompiledKernel) -> int:
    """Bytes of registers that did not fit, by ptxas's own report."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-arch=sm_90a", "-v", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", report))


def main() -> None:
    compiled: dict[str, dict[int, CompiledKernel]] = defaultdict(dict)
    compile_only(compiled)
    for step in STEPS:
        step()
    for name, kernels in compiled.items():
        result = {
            "kernel": name,
            "variants": len(kernels),
            "spilled_bytes": max(spilled_bytes(k) for k in kernels.values()),
            "shared_bytes": max(k.metadata.shared for k in kernels.values()),
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()

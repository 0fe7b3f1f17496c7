"""Another engine's batch in its own process, without HTTP: transformers' generate (one static batch), or vLLM's LLM.

Runs in the virtual environment of that engine and imports nothing of this repository. Prints one JSON line; the first
batch, which is slower, is not timed.

    peers/transformers/bin/python scripts/peers/offline_generate.py transformers MODEL --dtype bfloat16
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], int]
"""Prompts and tokens of each answer to the number of tokens that were made."""


def transformers_engine(model: str, dtype: str) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    loaded.eval()

    def generate(prompts: list[list[int]], num_out: int) -> int:
        ids = torch.tensor(prompts)
        greedy = GenerationConfig(
            max_new_tokens=num_out, min_new_tokens=num_out, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        with torch.inference_mode():
            whole = loaded.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
        return int(whole.shape[1] - ids.shape[1]) * len(prompts)

    return generate


def vllm_engine(model: str, dtype: str) -> Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, max_model_len=1024, enforce_eager=True, generation_config="vllm")

    def generate(prompts: list[list[int]], num_out: int) -> int:
        greedy = SamplingParams(temperature=0, max_tokens=num_out, ignore_eos=True)
        answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    return generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["transformers", "vllm"])
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    args = parser.parse_args()
    generate = {"transformers": transformers_engine, "vllm": vllm_engine}[args.engine](args.model, args.dtype)
    rng = random.Random(0)

    def prompts() -> list[list[int]]:
        return [[rng.randrange(300, 1000) for _ in range(args.input_len)] for _ in range(args.requests)]

    generate(prompts(), args.output_len)
    batch, start_s = prompts(), time.perf_counter()
    num_tokens = generate(batch, args.output_len)
    print(json.dumps({"engine": args.engine, "output_tokens_per_s": num_tokens / (time.perf_counter() - start_s)}))


if __name__ == "__main__":
    main()

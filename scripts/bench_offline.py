"""Throughput without HTTP: all requests at once through LLM.generate, prompts as random token ids.

The default is 32 requests of 128 tokens in and 64 out. --uniform LOW HIGH draws both lengths uniformly, seed 0:
`--requests 256 --uniform 100 1024` is the workload that nano-vllm and mini-sglang publish. One JSON line.

    python scripts/bench_offline.py --model demo
"""

import argparse
import random
import statistics
import time

from report import emit

from aserve import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, and the demo model's tokenizer")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--uniform", type=int, nargs=2, metavar=("LOW", "HIGH"))
    parser.add_argument("--token-range", type=int, nargs=2, default=(300, 1000))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rng = random.Random(0)
    seconds: list[float] = []
    options = {"load_format": args.load_format, "device": args.device, "max_num_seqs": args.max_num_seqs}
    if args.load_format == "dummy":
        options["tokenizer"] = "demo"
    with LLM(args.model, **options) as llm:
        for _ in range(args.rounds):
            lengths = [
                (rng.randint(*args.uniform), rng.randint(*args.uniform))
                if args.uniform
                else (args.input_len, args.output_len)
                for _ in range(args.requests)
            ]
            prompts = [[rng.randrange(*args.token_range) for _ in range(num_in)] for num_in, _ in lengths]
            params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_out) for _, num_out in lengths]
            start_s = time.perf_counter()
            completions = llm.generate(prompts, params, use_tqdm=False)
            seconds.append((time.perf_counter() - start_s) / sum(len(c.token_ids) for c in completions))
    config = {"model": args.model, "requests": args.requests, "rounds": args.rounds}
    config["lengths"] = list(args.uniform) if args.uniform else [args.input_len, args.output_len]
    emit("offline", config, {"output_tokens_per_s": 1 / statistics.median(seconds)})


if __name__ == "__main__":
    main()

"""What one model serves on one device, part by part, for the goals that gpu_report.py lists. Random weights.

offline: requests all at once in this process; the published workload (256 requests of 100 to 1024 tokens in and out)
    where --uniform says so, and for each of --concurrency as many requests as that, to compare `serving` with.
cache_cost: the last of those with the prefix cache on and off, prompts that share nothing.
serving: the same over streamed HTTP, from a server that is started for it.
ttft: the time to the first token of one request at a time, of each of --ttft-len tokens.
load: requests at random times, at 70 % of the rate at which `serving` answered them: time between tokens.
prefix: requests that share nine tenths of the longest --ttft-len, one after another.
peer: transformers' continuous batching on as many requests as --peer-requests, and aserve on the same.

Every id of the vocabulary has a text (load/words.py): a token without one would be no event. One JSON line a figure.
A part that fails says so in a line of its own, and the others go on.

    python scripts/bench_goals.py --model scripts/shapes/qwen3-8b --device cuda --parts offline serving ttft load prefix
"""

import argparse
import gc
import json
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from bench_offline import Workload, time_round, uniform_workload
from load.prefix import prefix_figures, sharing
from load.process import Server, exit_on_sigterm, free_port
from load.words import write_words
from report import emit

from aserve import LLM
from aserve.load.arrivals import Arrival, poisson
from aserve.load.drive import Target, closed_loop, open_loop, run
from aserve.load.figures import Figures, of_round
from aserve.load.prompts import Prompts

TOKEN_RANGE: Final = (300, 1000)
PUBLISHED: Final = (100, 1024)
IN_PROCESS: Final = ("offline", "cache_cost", "peer")
OVER_HTTP: Final = ("serving", "ttft", "load", "prefix")
START_S: Final = 90.0
LOAD_SHARE: Final = 0.7


class Bench:
    """The parts of one model, device and set of sizes."""

    def __init__(self, args: argparse.Namespace, tokenizer: Path) -> None:
        self._args = args
        self._tokenizer = str(tokenizer)
        self._rng = random.Random(0)
        self._requests_per_s: float | None = None

    def parts_in_process(self) -> dict[str, Callable[[], None]]:
        """The parts that need no server, by name."""
        return {"offline": self.offline, "cache_cost": self.cache_cost, "peer": self.peer}

    def parts_over_http(self, url: str) -> dict[str, Callable[[], None]]:
        """Those of a server; `load` after `serving`, whose rate it takes."""
        target = Target(url, Prompts(range(*TOKEN_RANGE)))
        parts = {"serving": self.serving, "ttft": self.ttft, "load": self.load, "prefix": self.prefix}
        return {name: lambda part=part: part(target) for name, part in parts.items()}  # type: ignore[misc]

    def emit(self, part: str, config: dict[str, Any], figures: Figures) -> None:
        """One line."""
        model = {"model": Path(self._args.model).name, "quantization": self._args.quantization}
        emit("goals", {"part": part, **model, **config}, figures)

    def offline(self) -> None:
        """Tokens per second of each workload."""
        with self._llm() as llm:
            if self._args.uniform:
                workload = uniform_workload(random.Random(0), self._args.requests, PUBLISHED, TOKEN_RANGE)
                self.emit("offline", {"workload": "published"}, self._offline_figures(llm, workload))
            for count in self._args.concurrency:
                self.emit("offline", {"concurrency": count}, self._offline_figures(llm, self._equal(count)))

    def cache_cost(self) -> None:
        """How much longer the same takes with the prefix cache, where nothing is shared."""
        count = self._args.concurrency[-1]
        seconds = {}
        for caches in (False, True):
            with self._llm(enable_prefix_caching=caches) as llm:
                seconds[caches] = min(time_round(llm, self._equal(count), 0.0)[0] for _ in range(self._args.rounds))
        self.emit("cache_cost", {"concurrency": count}, {"cost": seconds[True] / seconds[False] - 1})

    def peer(self) -> None:
        """transformers' continuous batching and aserve on equal requests, one after the other."""
        prompts, lengths = self._equal(self._args.peer_requests)
        with self._llm() as llm:
            ours = self._offline_figures(llm, (prompts, lengths))["output_tokens_per_s"]
        gc.collect()
        theirs = transformers_tokens_per_s(self._args.model, self._args.device, prompts, lengths[0])
        figures = {"aserve_tokens_per_s": ours, "transformers_tokens_per_s": theirs, "ratio": ours / theirs}
        self.emit("peer", {"requests": self._args.peer_requests}, figures)

    def serving(self, target: Target) -> None:
        """Every request streamed, as many at once as there are."""
        for count in self._args.concurrency:
            arrivals = [Arrival(0.0, self._args.input_len, self._args.output_len)] * count
            done = run(closed_loop(target, arrivals, count, self._rng))
            done.check()
            self._requests_per_s = len(done.samples) / done.wall_s
            self.emit("serving", {"concurrency": count}, of_round(done))

    def ttft(self, target: Target) -> None:
        """One request at a time, prompts that share nothing."""
        for length in self._args.ttft_len:
            done = run(closed_loop(target, [Arrival(0.0, length, 2)] * self._args.samples, 1, self._rng))
            done.check()
            self.emit("ttft", {"input_len": length}, of_round(done))

    def load(self, target: Target) -> None:
        """Poisson arrivals for some seconds."""
        peak = self._requests_per_s or 1.0
        rate = LOAD_SHARE * peak
        arrivals = [Arrival(0.0, self._args.input_len, self._args.output_len)] * max(
            2, int(rate * self._args.load_seconds)
        )
        done = run(open_loop(target, poisson(arrivals, rate, self._rng), self._rng))
        done.check()
        self.emit("load", {"rate": round(rate, 2), "share_of_peak": LOAD_SHARE}, of_round(done))

    def prefix(self, target: Target) -> None:
        """The first request computes all, the others a tenth."""
        length = self._args.ttft_len[-1]
        arrival = sharing(length * 9 // 10, length - length * 9 // 10, 2)
        done = run(closed_loop(target, [arrival] * (1 + self._args.samples), 1, self._rng, 7))
        self.emit("prefix", {"input_len": length, "shared": 0.9}, prefix_figures(done))

    @contextmanager
    def _llm(self, **options: Any) -> Iterator[LLM]:
        options = {"load_format": "dummy", "tokenizer": self._tokenizer, "device": self._args.device, **options}
        options["quantization"] = self._args.quantization
        with LLM(self._args.model, max_model_len=self._args.max_model_len, **options) as llm:
            time_round(llm, self._equal(2), 0.0)  # the first requests are slower
            yield llm

    def _equal(self, count: int) -> Workload:
        prompts = [[self._rng.randrange(*TOKEN_RANGE) for _ in range(self._args.input_len)] for _ in range(count)]
        return prompts, [self._args.output_len] * count

    @staticmethod
    def _offline_figures(llm: LLM, workload: Workload) -> Figures:
        seconds, num_out = time_round(llm, workload, 0.0)
        return {"output_tokens_per_s": num_out / seconds, "wall_s": seconds}


def transformers_tokens_per_s(model: str, device: str, prompts: list[list[int]], num_out: int) -> float:
    """Random weights of the same shape; its own choice of graphs and overlap, by sdpa. The second time counts.

    On a CPU its cache is kept small: it would fill the memory with zeros.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    on_gpu = device == "cuda"
    with torch.device(device):
        lm = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model),
            dtype=torch.bfloat16 if on_gpu else torch.float32,
            attn_implementation="sdpa",
        ).eval()
    options = {
        "generation_config": GenerationConfig(max_new_tokens=num_out, do_sample=False, eos_token_id=-1, pad_token_id=0),
        "continuous_batching_config": None if on_gpu else ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64),
        "persistent_manager": True,
    }
    lm.generate_batch(inputs=prompts, **options)
    start_s = time.perf_counter()
    outputs = lm.generate_batch(inputs=prompts, **options)
    seconds = time.perf_counter() - start_s
    lm.destroy_cached_continuous_batching_manager()
    return sum(len(output.generated_tokens) for output in outputs.values()) / seconds


def run_parts(parts: dict[str, Callable[[], None]], wanted: Sequence[str]) -> bool:
    """Run those that are wanted, in their own order; whether none failed."""
    went_well = True
    for name, part in parts.items():
        if name not in wanted:
            continue
        try:
            part()
        except Exception as error:  # the edge of a part: what the others find is worth having
            traceback.print_exc()
            emit("goals_failed", {"part": name, "error": f"{type(error).__name__}: {error}"[:200]}, {})
            went_well = False
    return went_well


def serve(args: argparse.Namespace, bench: Bench, tokenizer: Path) -> bool:
    """Start a server, run the parts that need one, stop it."""
    port = free_port()
    options = {"model": args.model, "load-format": "dummy", "tokenizer": str(tokenizer), "device": args.device}
    options["port"] = str(port)
    if args.quantization is not None:
        options["quantization"] = args.quantization
    if args.max_model_len is not None:
        options["max-model-len"] = str(args.max_model_len)
    options |= dict(words.split("=", 1) for words in args.server)
    command = [
        sys.executable,
        "-m",
        "aserve",
        *(word for name, value in options.items() for word in (f"--{name}", value)),
    ]
    body = {"prompt": [300, 301], "max_tokens": 8, "ignore_eos": True}
    with Server(command, port, tokenizer / "server.log") as server:
        server.wait_for("/v1/completions", START_S, json.dumps(body).encode())
        return run_parts(bench.parts_over_http(server.url), args.parts)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder with a config.json")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantization", help="of the linear layers: fp8")
    parser.add_argument("--parts", nargs="+", choices=IN_PROCESS + OVER_HTTP, default=["offline", "serving"])
    parser.add_argument("--uniform", action="store_true", help="the published workload too")
    parser.add_argument("--requests", type=int, default=256, help="of the published workload")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--ttft-len", type=int, nargs="+", default=[128, 2048, 8192])
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--load-seconds", type=float, default=8.0)
    parser.add_argument("--peer-requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2, help="of cache_cost")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--server", nargs="*", default=[], metavar="FLAG=VALUE", help="of the server: target-itl-ms=0")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    exit_on_sigterm()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_words(Path(folder), Path(args.model))
        bench = Bench(args, tokenizer)
        went_well = run_parts(bench.parts_in_process(), args.parts)
        gc.collect()
        if set(args.parts) & set(OVER_HTTP):
            went_well = serve(args, bench, tokenizer) and went_well
    sys.exit(not went_well)


if __name__ == "__main__":
    main()

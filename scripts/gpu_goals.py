"""The goals for one H200, in bfloat16 with random weights: what is measured, by which stages, what is good enough.

The one source of the goals, of their rooflines and of the estimates that docs/performance.md shows. A roofline is what
the datasheet allows, 4.8 TB/s and 990 TFLOP/s: the bytes that must be read or the products to be computed, over that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

LARGEST_BATCH: Final = 256
CONTEXT: Final = 1024

Result = dict[str, Any]


class MissingError(Exception):
    """No result has a figure that a goal is about."""


class Results:
    """Every line of every benchmark."""

    def __init__(self, lines: Sequence[Result]) -> None:
        self.lines = lines

    def all(self, **wanted: object) -> list[Result]:
        """The results that have these values; a model is meant by its folder's name."""
        return [one for one in self.lines if all(_value(one, name) == value for name, value in wanted.items())]

    def figure(self, name: str, **wanted: object) -> float:
        """Of the last such result. Raises MissingError."""
        found = [one[name] for one in self.all(**wanted) if one.get(name) is not None]
        if not found:
            raise MissingError(f"{name} of {' '.join(map(str, wanted.values()))}")
        return float(found[-1])


@dataclass(frozen=True)
class Verdict:
    """What was measured of a goal, in words, and whether that is good enough."""

    measured: str
    met: bool


@dataclass(frozen=True)
class Goal:
    """A line of the table. stages: those of gpu_check.py that measure it. judge: raises MissingError."""

    name: str
    goal: str
    roofline: str
    estimate: str
    stages: tuple[str, ...]
    judge: Callable[[Results], Verdict]


def at_most(limits: Sequence[float], values: Sequence[float], unit: str) -> Verdict:
    """Each value against its limit."""
    met = all(value <= limit for value, limit in zip(values, limits, strict=True))
    return Verdict(f"{' / '.join(f'{value:.4g}' for value in values)} {unit}", met)


def at_least(limits: Sequence[float], values: Sequence[float], unit: str) -> Verdict:
    """Each value against its limit."""
    met = all(value >= limit for value, limit in zip(values, limits, strict=True))
    return Verdict(f"{' / '.join(f'{value:.4g}' for value in values)} {unit}", met)


def decode_step(model: str, *limits_ms: float) -> Callable[[Results], Verdict]:
    """Milliseconds of a step at 1, 32 and 256 sequences, and the share of the roofline."""

    def judge(results: Results) -> Verdict:
        of = {"bench": "decode", "model": model, "context": CONTEXT, "quantization": None}
        times_ms = [results.figure("step_ms", **of, batch=batch) for batch in (1, 32, LARGEST_BATCH)]
        shares = [results.figure("roofline_share", **of, batch=batch) for batch in (1, 32, LARGEST_BATCH)]
        verdict = at_most(limits_ms, times_ms, "ms")
        return Verdict(f"{verdict.measured} ({' / '.join(f'{share:.0%}' for share in shares)})", verdict.met)

    return judge


def published_workload(results: Results) -> Verdict:
    models = ("qwen3-0.6b", "qwen3-4b", "qwen3-8b")
    of = {"bench": "goals", "part": "offline", "workload": "published"}
    return at_least(
        (22e3, 12.5e3, 9.3e3), [results.figure("output_tokens_per_s", **of, model=m) for m in models], "tok/s"
    )


def streaming(results: Results) -> Verdict:
    ratios = []
    for model in ("qwen3-8b", "qwen3-0.6b"):
        for concurrency in (64, 256):
            over_http, offline = (
                results.figure("output_tokens_per_s", bench="goals", part=part, model=model, concurrency=concurrency)
                for part in ("serving", "offline")
            )
            ratios.append(over_http / offline)
    return at_least((0.92, 0.85, 0.80, 0.60), ratios, "of offline")


def busy(results: Results) -> Verdict:
    of = {"bench": "decode", "model": "llama-3.1-8b", "batch": 32, "quantization": None}
    share, gap_us = results.figure("busy_share", **of), results.figure("gap_us", **of)
    return Verdict(f"{share:.1%}, {gap_us:.0f} us", share >= 0.97 and gap_us <= 60)


def first_token(results: Results) -> Verdict:
    of = {"bench": "goals", "part": "ttft", "model": "qwen3-8b"}
    times_ms = [results.figure("ttft_p50_ms", **of, input_len=length) for length in (128, 2048, 8192)]
    return at_most((12, 58, 250), times_ms, "ms")


def under_load(results: Results) -> Verdict:
    of = {"bench": "goals", "part": "load", "model": "qwen3-8b"}
    p50_ms, p99_ms = results.figure("itl_p50_ms", **of), results.figure("itl_p99_ms", **of)
    return Verdict(f"{p99_ms / p50_ms:.2f} x ({p99_ms:.3g} / {p50_ms:.3g} ms)", p99_ms <= 2.5 * p50_ms)


def decode_kernel(results: Results) -> Verdict:
    """The slowest with 32k keys or more, and the worst step from a batch size to the next, in time a sequence."""
    cases = sorted(results.all(bench="kernels", kernel="decode_attention"), key=lambda c: (c["context"], c["seqs"]))
    large = [case["gb_per_s"] / 1e3 for case in cases if case["seqs"] * case["context"] >= 2**15]
    cliffs = [
        (after["us"] / after["seqs"]) / (before["us"] / before["seqs"])
        for before, after in pairwise(cases)
        if after["context"] == before["context"]
    ]
    if not large or not cliffs:
        raise MissingError("decode_attention of bench_kernels.py")
    return Verdict(f"{min(large):.2f} TB/s, {max(cliffs):.2f} x", min(large) >= 3.5 and max(cliffs) <= 1.15)


def prefill_kernel(results: Results) -> Verdict:
    speeds = [
        results.figure("tflop_per_s", bench="kernels", kernel="prefill_attention", seqs=1, queries=n, context=n)
        for n in (4096, 8192)
    ]
    return at_least((380, 380), speeds, "TFLOP/s")


def prefix_cache(results: Results) -> Verdict:
    cost = results.figure("cost", bench="goals", part="cache_cost")
    gain = 1 / results.figure("later_over_first", bench="goals", part="prefix", model="qwen3-8b", input_len=8192)
    return Verdict(f"{cost:.1%}, {gain:.1f} x", cost <= 0.01 and gain >= 5)


def peer(results: Results) -> Verdict:
    return at_least((4,), [results.figure("ratio", bench="goals", part="peer")], "x")


def quantized(results: Results) -> Verdict:
    """A step in 16 bits over one of float8."""
    of = {"bench": "decode", "model": "llama-3.1-8b", "context": CONTEXT}
    ratios = []
    for batch in (1, LARGEST_BATCH):
        plain, fp8 = (results.figure("step_ms", **of, batch=batch, quantization=kind) for kind in (None, "fp8"))
        ratios.append(plain / fp8)
    return at_least((1.35, 1.1), ratios, "x")


def host(results: Results) -> Verdict:
    us = results.figure("total_us", bench="step", num_running=LARGEST_BATCH)
    return at_most((1000, 3), (us, us / LARGEST_BATCH), "us a step / a request")


GOALS: Final = (
    Goal(
        "G1",
        "step of Llama-3.1-8B <= 4.8 / 6.2 / 17.0 ms (1, 32, 256 sequences of 1024)",
        "3.16 / 4.02 / 11.0 ms",
        "4.4 / 5.6 / 16: weights at 4.0 TB/s (256 rows: products at 700 TFLOP/s), keys and values at 3.5 TB/s, "
        "290 kernels 1.3 us apart, 0.2 to 0.3 ms of sampling",
        ("decode_llama-3.1-8b",),
        decode_step("llama-3.1-8b", 4.8, 6.2, 17.0),
    ),
    Goal(
        "G2",
        "step of Qwen3-4B <= 2.7 / 4.3 / 15.7 ms",
        "1.71 / 2.68 / 10.1 ms",
        "2.7 / 4.1 / 14.8: likewise, with 330 kernels",
        ("decode_qwen3-4b",),
        decode_step("qwen3-4b", 2.7, 4.3, 15.7),
    ),
    Goal(
        "G3",
        "step of Qwen3-0.6B <= 1.1 / 2.0 / 10.5 ms",
        "0.27 / 1.03 / 6.57 ms",
        "0.95 / 1.9 / 9.8: likewise; alone it is the number of kernels, 280, that takes the time",
        ("decode_qwen3-0.6b",),
        decode_step("qwen3-0.6b", 1.1, 2.0, 10.5),
    ),
    Goal(
        "G4",
        "offline >= 22k / 12.5k / 9.3k tok/s (0.6B / 4B / 8B; 256 requests of 100 to 1024 tokens in and out)",
        "40.1k / 20.2k / 14.7k tok/s",
        "23 to 26k / 12 to 13k / 9 to 9.6k: steps as above, prompts at 0.6 of the matrix units' speed",
        ("offline_qwen3-0.6b", "offline_qwen3-4b", "offline_qwen3-8b"),
        published_workload,
    ),
    Goal(
        "G5",
        "HTTP >= 0.92 / 0.85 (8B), 0.80 / 0.60 (0.6B) of offline (64, 256 streams)",
        "1",
        "0.9 / 0.9, 0.85 / 0.85: a step's text is made while the device computes the next; opening the streams is not",
        ("http_qwen3-8b", "offline_qwen3-8b", "http_qwen3-0.6b", "offline_qwen3-0.6b"),
        streaming,
    ),
    Goal(
        "G6",
        "busy >= 97 %, gap <= 60 us (8B, 32 sequences)",
        "100 %, 0 us",
        "97 to 99 %, 20 to 50 us: the next step is launched before this one ends; between two graphs lies one upload",
        ("decode_llama-3.1-8b",),
        busy,
    ),
    Goal(
        "G7",
        "first token <= 12 / 58 / 250 ms (8B, idle, over HTTP: 128, 2k, 8k tokens)",
        "3.2 / 30 / 135 ms",
        "8 to 11 / 57 to 60 / 255 to 265: 128 tokens are 330 launches; products at 650 TFLOP/s, attention at 400",
        ("http_qwen3-8b",),
        first_token,
    ),
    Goal(
        "G8",
        "inter-token p99 <= 2.5 x p50 at 70 % load (8B)",
        "1 x",
        "2 to 3: a step in which somebody decodes takes 2.5 times as long as it would without prompts, as predicted",
        ("http_qwen3-8b",),
        under_load,
    ),
    Goal(
        "G9",
        "decode attention >= 3.5 TB/s, no cliff > 1.15 x (32k keys or more)",
        "4.8 TB/s",
        "3.3 to 3.8: three programs an SM, each with 70 KiB under way",
        ("kernels",),
        decode_kernel,
    ),
    Goal(
        "G10",
        "prefill attention >= 380 TFLOP/s (causal, 4k / 8k)",
        "990 TFLOP/s",
        "350 to 430: one program an SM, in which softmax and products take turns",
        ("kernels",),
        prefill_kernel,
    ),
    Goal(
        "G11",
        "prefix cache: cost <= 1 %, gain >= 5 x (8B, 8k, nine tenths shared)",
        "0 %, 8.8 x",
        "1 %, 7 to 8: hashes are made before admission; the last tenth attends to all, and a request has its own time",
        ("cache_cost_qwen3-0.6b", "http_qwen3-8b"),
        prefix_cache,
    ),
    Goal(
        "G12",
        ">= 4 x transformers' continuous batching (0.6B, 32 requests)",
        "",
        "5 to 8: its step is 10 to 15 ms of Python, ours 2 ms of the device",
        ("peer_qwen3-0.6b",),
        peer,
    ),
    Goal(
        "G13",
        "FP8 >= 1.35 x / 1.1 x of bf16 (8B: 1, 256 sequences)",
        "1.8 x / 1.2 x",
        "1.6 / 1.15: half of the bytes of the layers' weights, by kernels that take as long as before for the rest; of "
        "256 rows products at 1.6 times the speed, and each row's quantization",
        ("decode_llama-3.1-8b", "decode_llama-3.1-8b_fp8"),
        quantized,
    ),
    Goal(
        "G14",
        "host <= 1.0 ms a step, 3 us a request (256)",
        "",
        "0.4 to 0.8 ms: 0.75 ms on an EPYC's core before tokens left side by side, which takes 0.44 of that",
        ("step",),
        host,
    ),
)


def _value(result: Result, name: str) -> object:
    value = result.get(name)
    return Path(value).name if name == "model" and isinstance(value, str) else value

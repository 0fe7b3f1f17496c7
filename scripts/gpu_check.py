"""The stages of gpu_check.sh, which says how to call it, and their order."""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import gpu_report
from gpu_stages import Record, Stage, Stages, read_records
from load.process import exit_on_sigterm

OUTPUTS: Final = ("stages.jsonl", "results.jsonl", "goals.json", "report.txt", "log.txt", "running-*.log")
WITHOUT_A_GPU: Final = (
    "test_compile",
    "test_bench_kernels",
    "test_sanitized",
    "test_interpreter",
    "test_cpu_attention",
)
"""Of tests/kernels: what compiles for a GPU that is not there, or needs none, as all that is `native` does."""
ON_THE_GPU: Final = "not native and not cpu"
"""Of tests with parameters, by their names: those of kernels that run on the device."""
PLAIN_PYTEST: Final = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
"""No plugin that the machine happens to have; one thread, since many tests run side by side."""
ASYNC: Final = ("-p", "pytest_asyncio.plugin")
IMPORT_ALL: Final = "import transformers, aserve.cli, aserve.llm, aserve.http.app, aserve.server"

DEVICE: Final = "device"

Group = tuple[Stage, ...]


def bench(name: str, limit_s: float, script: str, *arguments: str) -> Group:
    """A script of this folder."""
    return (Stage(name, limit_s, (sys.executable, f"scripts/{script}", *arguments)),)


def needs_no_gpu(path: Path) -> bool:
    """Whether a file of tests/kernels is about the CPU alone, or about compiling."""
    return path.stem in WITHOUT_A_GPU or path.stem.startswith("test_native")


def tests(name: str, limit_s: float, *arguments: str) -> Stage:
    """pytest."""
    options = ("-q", "-p", "no:cacheprovider", "--tb=short", "--maxfail=20")
    return Stage(name, limit_s, (sys.executable, "-m", "pytest", *options, *arguments), PLAIN_PYTEST)


def kernel_tests(limit_s: float) -> Group:
    """Each file by itself, since most of their time is compiling, and the largest in two parts. Of Triton's kernels."""
    stages = []
    for path in sorted(Path("tests/kernels").glob("test_*.py")):
        if path.stem == "test_attention":
            stages.append(
                tests("test_attention_shapes", limit_s, str(path), "-k", f"test_head_shapes and {ON_THE_GPU}")
            )
            stages.append(tests("test_attention", limit_s, str(path), "-k", f"not test_head_shapes and {ON_THE_GPU}"))
        elif not needs_no_gpu(path):
            stages.append(tests(path.stem, limit_s, str(path), "-k", ON_THE_GPU))
    return tuple(stages)


def other_gpu_tests(limit_s: float) -> Group:
    """The files outside tests/kernels that have tests for a GPU."""
    paths = sorted(Path("tests").rglob("test_*.py"))
    wanted = [path for path in paths if path.parent.name != "kernels" and "mark.gpu" in path.read_text()]
    return tuple(tests(path.stem, limit_s, *ASYNC, "-m", "gpu", str(path)) for path in wanted)


def decode(model: str, limit_s: float, bandwidth: str, *arguments: str, kind: str = "") -> Group:
    """Decode steps of a shape of scripts/shapes, with random weights. kind: what is said of them behind its name."""
    options = ("--model", f"scripts/shapes/{model}", "--load-format", "dummy", "--bandwidth", bandwidth)
    return bench(f"decode_{model}{kind}", limit_s, "bench_decode.py", *options, *arguments)


def goals(kind: str, model: str, limit_s: float, *arguments: str) -> Group:
    """Parts of bench_goals.py, random weights too."""
    return bench(f"{kind}_{model}", limit_s, "bench_goals.py", "--model", f"scripts/shapes/{model}", *arguments)


def first(device: str, wheels: str | None, site: str) -> list[Group]:
    """What every machine needs before the rest, also where a check goes on."""
    pip = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target", site)
    found = sorted(map(str, Path(wheels).glob("*.whl"))) if wheels else []
    install: list[Group] = [(Stage("install", 60, (sys.executable, *pip, *found)),)] if wheels else []
    return [*install, bench(DEVICE, 90, "gpu_device.py", device)]


def on_a_gpu(bandwidth: str) -> list[Group]:
    """In the order of what is worth most; the limits are half as much again as what an H200 took, cold."""
    cuda = ("--device", "cuda")
    uniform = (*cuda, "--uniform", "--parts")
    imports = Stage("import_all", 90, (sys.executable, "-c", IMPORT_ALL))
    return [
        (*kernel_tests(120), *other_gpu_tests(120), imports),
        bench("kernels", 40, "bench_kernels.py"),
        decode("llama-3.1-8b", 70, bandwidth, *cuda),
        decode("llama-3.1-8b", 60, bandwidth, *cuda, "--quantization", "fp8", kind="_fp8"),
        decode("qwen3-0.6b", 60, bandwidth, *cuda),
        bench("step", 15, "bench_step.py", "--sizes", "256", "--steps", "300"),
        goals("offline", "qwen3-8b", 60, *uniform, "offline"),
        goals("http", "qwen3-8b", 60, *cuda, "--parts", "serving", "ttft", "load", "prefix"),
        decode("qwen3-4b", 50, bandwidth, *cuda),
        goals("offline", "qwen3-0.6b", 35, *uniform, "offline"),
        goals("http", "qwen3-0.6b", 50, *cuda, "--parts", "serving"),
        goals("offline", "qwen3-4b", 40, *uniform, "offline", "--concurrency", "64"),
        goals("cache_cost", "qwen3-0.6b", 45, *cuda, "--parts", "cache_cost"),
        goals("peer", "qwen3-0.6b", 90, *cuda, "--parts", "peer"),
    ]


def on_a_cpu(bandwidth: str) -> list[Group]:
    """The same kinds of stages on tiny shapes. They take seconds; the limits are for a machine that is busy."""
    cpu = ("--device", "cpu", "--requests", "2", "--concurrency", "1", "2", "--input-len", "8", "--output-len", "4")
    sizes = ("--ttft-len", "8", "40", "--samples", "2", "--load-seconds", "0.2", "--max-model-len", "2200")
    few = (*cpu, *sizes, "--peer-requests", "2", "--rounds", "1", "--uniform", "--parts")
    paths = ("tests/runner/test_device.py", "tests/runner/test_graphs.py")
    return [
        (
            tests("test_norm", 300, "tests/kernels/test_norm.py"),
            tests("test_runner", 300, *ASYNC, "-m", "not slow", *paths),
            Stage("import_all", 300, (sys.executable, "-c", IMPORT_ALL)),
        ),
        bench("kernels", 300, "bench_kernels.py", "--dry-run"),
        decode("tiny", 300, bandwidth, "--dry-run", "--device", "cpu"),
        bench("step", 300, "bench_step.py", "--sizes", "4", "--steps", "4"),
        goals("offline", "tiny", 300, *few, "offline", "cache_cost"),
        goals("http", "tiny", 300, *few, "serving", "ttft", "load", "prefix"),
        goals("peer", "tiny", 300, *few, "peer"),
    ]


def remaining(groups: Sequence[Group], start: str | None, done: set[str]) -> list[Group]:
    """The groups from that of the stage `start` on, without what is done. Raises SystemExit for no such stage."""
    names = [stage.name for group in groups for stage in group]
    if start is not None and start not in names:
        sys.exit(f"no stage {start}; there are {' '.join(names)}")
    places = [i for i, group in enumerate(groups) if any(stage.name == start for stage in group)]
    left = [tuple(stage for stage in group if stage.name not in done) for group in groups[places[0] if places else 0 :]]
    return [group for group in left if group]


def run(stages: Stages, groups: Sequence[Group]) -> bool:
    """All of them, whatever becomes of any; but nothing without the device. Whether all ended well."""
    well, has_device = True, True
    for group in groups:
        print("==", *(stage.name for stage in group), flush=True)
        if not has_device:
            stages.refuse(group, "the device did not answer")
            continue
        ended_well = stages.run(group)
        well = well and ended_well
        has_device = ended_well or group[0].name != DEVICE
    return well


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="the CPU and tiny shapes, to prove the script")
    parser.add_argument("--wheels", help="a folder of gather_wheels.sh, to install first")
    parser.add_argument("--from", dest="start", metavar="STAGE", help="go on there; what $OUT has is kept")
    parser.add_argument("--resume", action="store_true", help="without the stages that ended well in $OUT")
    parser.add_argument("--seconds", type=float, default=570.0, help="of all; what no longer fits is not started")
    parser.add_argument("--list", action="store_true", help="the stages and their limits, side by side in a line")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    exit_on_sigterm()
    folder, bandwidth = Path(os.environ.get("OUT", "gpu_check")), os.environ.get("BANDWIDTH", "4.8e12")
    device, rest = ("cpu", on_a_cpu(bandwidth)) if args.dry_run else ("cuda", on_a_gpu(bandwidth))
    if args.list:
        print("\n".join(" ".join(f"{stage.name} ({stage.limit_s:g} s)" for stage in group) for group in rest))
        return
    folder.mkdir(parents=True, exist_ok=True)
    if args.start is None and not args.resume:
        for path in (path for pattern in OUTPUTS for path in folder.glob(pattern)):
            path.unlink()
    done = {name for name, record in read_records(folder).items() if args.resume and record["ending"] == "ok"}

    def tell(record: Record) -> None:
        print(f"{record['stage']} {record['ending']}, {record['seconds']} s", flush=True)
        gpu_report.write(folder, dry_run=args.dry_run)

    if args.dry_run:
        os.environ["OMP_NUM_THREADS"] = "1"  # on a busy machine two wait for each other longer than either computes
    with tempfile.TemporaryDirectory() as site:
        os.environ["PYTHONPATH"] = os.pathsep.join([site, os.environ.get("PYTHONPATH", "")])
        groups = [*first(device, args.wheels, site), *remaining(rest, args.start, done)]
        well = run(Stages(folder, args.seconds, tell), groups)
    print(f"\n{gpu_report.write(folder, dry_run=args.dry_run)}", flush=True)
    sys.exit(not well)


if __name__ == "__main__":
    main()

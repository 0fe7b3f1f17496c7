"""vLLM's own HTTP tests against aserve: which functions pass, which differ on purpose, which do not apply.

    scripts/peers/install.sh vllm-tests                 # vLLM and pytest, in peers/vllm-tests
    python scripts/peers/vllm_tests.py                  # downloads vLLM's source, runs its tests, prints a table
    python scripts/peers/vllm_tests.py entrypoints/openai/completion --source FOLDER     # a part, of a checkout

Nothing of the tests is changed: a plugin (vllm_tests_plugin.py) starts aserve in the place of `vllm serve`, and every
model that they name is the demonstration model (with a longer context, in which it rambles), by a Hugging Face cache in
which all these names lead to it; those of adapters lead to one that changes nothing.

vllm_tests.toml says which tests are run, and why a test is not run, or may fail. Exit status 1 where another fails, or
where one passes that is said to fail.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from safetensors.numpy import save_file

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
DEMO: Final = ROOT / "aserve/demo"
NEEDED: Final = ("tests", "examples", "pyproject.toml")
OFFLINE: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_NO_USAGE_STATS": "1",
}
COMMIT: Final = "0" * 40
CONTEXT: Final = 32768
RANK: Final = 8
TEST_TIMEOUT_S: Final = 120
NAME: Final = re.compile(r"""["']([A-Za-z0-9][\w.-]+/[A-Za-z0-9][\w.-]+)["']""")
FUNCTION: Final = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)
REASONS: Final = ("not_applicable", "their_model", "deliberate")


class Row(NamedTuple):
    """A test function, how it went (passed, failed, or one of REASONS), and why."""

    function: str
    verdict: str
    why: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="files and folders below vLLM's tests/ (default: those of the list)")
    parser.add_argument(
        "--source", type=Path, metavar="FOLDER", help="a checkout of vLLM (default: its source package)"
    )
    parser.add_argument("--python", type=Path, default=ROOT / "peers/vllm-tests/bin/python", metavar="FILE")
    parser.add_argument("--log", type=Path, default=Path("vllm_tests.log"), metavar="FILE", help="what pytest prints")
    arguments = parser.parse_args()
    listed = tomllib.loads((HERE / "vllm_tests.toml").read_text())
    with tempfile.TemporaryDirectory(prefix="vllm-tests-") as name:
        folder = Path(name)
        lay_out(arguments.source or downloaded(arguments.python, listed["version"], folder), folder / "vllm")
        names = models_named(folder / "vllm/tests/entrypoints") - set(listed["adapters"])
        model = long_demo(folder / "demo")
        for name in names:
            snapshot(folder / "cache", name).symlink_to(model)
        for name in listed["adapters"]:
            empty_adapter(snapshot(folder / "cache", name))
        tests = [f"tests/{name}" for name in arguments.tests or listed["tests"]]
        whole_files = [place for place, _ in places(listed["not_applicable"]) if place.startswith(tuple(tests))]
        lines = [*run(arguments, tests, listed, folder), *left_out(folder / "vllm", whole_files)]
    rows = verdicts((line for line in lines if "test" in line), listed)
    print_table(rows, Counter(line["flag"] for line in lines if "flag" in line))
    return int(not rows or any(row.verdict == "failed" for row in rows))


def downloaded(python: Path, version: str, folder: Path) -> Path:
    """vLLM's source package, as pip brings it. Its metadata are made by its own setup, which builds nothing here."""
    command: list[str | Path] = [python, "-m", "pip", "download", "--quiet", "--dest", folder, "--no-deps"]
    command += ["--no-build-isolation", "--no-binary", "vllm", f"vllm=={version}"]
    environ = os.environ | {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version}
    subprocess.run(command, env=environ, check=True)
    [package] = folder.glob("vllm-*.tar.gz")
    return package


def lay_out(source: Path, folder: Path) -> None:
    """What the tests need of a checkout or of a source package; not vLLM's package, which is installed."""
    folder.mkdir()
    if source.is_dir():
        for name in NEEDED:
            copy = shutil.copytree if (source / name).is_dir() else shutil.copyfile
            copy(source / name, folder / name)
        return
    with tarfile.open(source) as package:
        for member in package:
            member.name = member.name.partition("/")[2]
            if member.name.split("/")[0] in NEEDED:
                package.extract(member, folder, filter="data")


def models_named(folder: Path) -> set[str]:
    """Whatever stands in the tests as a text of the form owner/name."""
    return {name for file in folder.rglob("*.py") for name in NAME.findall(file.read_text())}


def long_demo(folder: Path) -> Path:
    """The demonstration model, whose folder says that it takes CONTEXT tokens."""
    shutil.copytree(DEMO, folder)
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        (folder / name).write_text(json.dumps({**json.loads((DEMO / name).read_text()), key: CONTEXT}))
    return folder


def empty_adapter(folder: Path) -> Path:
    """An adapter (LoRA) of the demonstration model's first layer, as PEFT saves it, that adds nothing."""
    folder.mkdir()
    config = json.loads((DEMO / "config.json").read_text())
    sizes = {"A": (RANK, config["hidden_size"]), "B": (config["num_attention_heads"] * config["head_dim"], RANK)}
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {f"{layer}.lora_{side}.weight": np.zeros(size, np.float32) for side, size in sizes.items()}
    save_file(factors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def snapshot(cache: Path, name: str) -> Path:
    """Where a Hugging Face cache has the files of that name, which are to be put there."""
    repository = cache / "hub" / f"models--{name.replace('/', '--')}"
    for part in ("refs", "snapshots"):
        (repository / part).mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    return repository / "snapshots" / COMMIT


def left_out(folder: Path, files: Iterable[str]) -> list[dict[str, str]]:
    """A line, as the plugin writes them, for each function of files that pytest is not shown."""
    return [
        {"test": f"{file}::{name}", "outcome": "left out", "why": ""}
        for file in files
        if "::" not in file
        for name in FUNCTION.findall((folder / file).read_text())
    ]


def run(
    arguments: argparse.Namespace, tests: list[str], listed: Mapping[str, Any], folder: Path
) -> list[dict[str, str]]:
    """The lines that the plugin writes."""
    python: Path = arguments.python.absolute()
    outcomes = folder / "outcomes"
    outcomes.touch()
    server = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "aserve", "--device", "cpu", "--lenient"]
    skipped = [place for place, _ in places(listed["not_applicable"])]
    environ = {
        **os.environ,
        **OFFLINE,
        "HF_HOME": str(folder / "cache"),
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(HERE),
        "TESTS_OF_ASERVE": json.dumps({"command": server, "left_out": skipped, "outcomes": str(outcomes)}),
    }
    command: list[str | Path] = [python, "-m", "pytest", "-q", "--tb=short", "-p", "vllm_tests_plugin"]
    command += ["-p", "no:cacheprovider", "--continue-on-collection-errors", f"--timeout={TEST_TIMEOUT_S}"]
    command += [f"--ignore={place}" for place in skipped if "::" not in place]
    command += tests
    with arguments.log.open("w") as log:
        subprocess.run(command, cwd=folder / "vllm", env=environ, stdout=log, stderr=log, check=False)
    return [json.loads(line) for line in outcomes.read_text().splitlines()]


def places(reasons: Mapping[str, list[str]]) -> Iterator[tuple[str, str]]:
    """Each file, or function of a file, with the reason that it is listed for."""
    return ((f"tests/{place}", why) for why, listed in reasons.items() for place in listed)


def verdicts(outcomes: Iterable[Mapping[str, str]], listed: Mapping[str, Any]) -> list[Row]:
    """A row for each function: one of its cases that fails makes it fail."""
    cases: dict[str, list[Mapping[str, str]]] = defaultdict(list)
    for line in outcomes:
        cases[line["test"].partition("[")[0]].append(line)
    reasons = {place: (verdict, why) for verdict in REASONS for place, why in places(listed[verdict])}
    return [_row(function, lines, reasons) for function, lines in cases.items()]


def _row(function: str, lines: list[Mapping[str, str]], reasons: Mapping[str, tuple[str, str]]) -> Row:
    verdict, why = reasons.get(function) or reasons.get(function.partition("::")[0]) or ("failed", "")
    outcomes = {line["outcome"] for line in lines}
    name = function.removeprefix("tests/")
    if failed := [line for line in lines if line["outcome"] == "failed"]:
        return Row(name, verdict, why or f"{len(failed)} of {len(lines)} cases: {failed[0]['why']}")
    if "passed" in outcomes:
        if verdict == "deliberate":
            return Row(name, "failed", f"it passes, though it is listed: {why}")
        return Row(name, "passed", "")
    if "white box" in outcomes:
        return Row(name, "not_applicable", "asks vLLM's own classes, and no server")
    return Row(name, "not_applicable", why or f"vLLM skips it: {lines[0]['why']}")


def print_table(rows: list[Row], flags: Mapping[str, int]) -> None:
    for row in rows:
        print(f"{row.verdict:<16}{row.function}" + (f"\n{'':<16}  {row.why}" if row.why else ""))
    counts = Counter(row.verdict for row in rows)
    print("\n" + ", ".join(f"{verdict}: {count}" for verdict, count in counts.most_common()))
    print("flags of vLLM that were left out at the server's start: " + (" ".join(sorted(flags)) or "none"))


if __name__ == "__main__":
    sys.exit(main())

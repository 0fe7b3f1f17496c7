"""A pytest plugin for vLLM's interpreter: its tests start aserve where they would start `vllm serve`.

vllm_tests.py passes, in the environment, TESTS_OF_ASERVE, a JSON object: the command that starts aserve, the places of
tests that are left out, and the file for outcomes. Outcomes are lines of JSON:
{"test", "outcome", "why"} for each test, {"flag"} for each flag of a server that was left out.
"""

import importlib
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, Self

import pytest

START_S: Final = 120.0
STARTS: Final = re.compile(r"Remote\w*Server\w*\(")
FORWARDED: Final = frozenset(
    {
        *(
            "--host",
            "--port",
            "--api-key",
            "--root-path",
            "--served-model-name",
            "--chat-template",
            "--generation-config",
        ),
        *("--max-num-seqs", "--max-logprobs", "--max-model-len", "--scheduling-policy", "--hf-overrides", "--runner"),
        *("--convert", "--enable-lora", "--lora-modules", "--max-loras", "--max-lora-rank", "--max-cpu-loras"),
        *("--enable-force-include-usage", "--return-tokens-as-token-ids", "--enable-tokenizer-info-endpoint"),
        *(
            "--generation-config",
            "--allowed-origins",
            "--reasoning-parser",
            "--tool-call-parser",
            "--no-enable-prefix-caching",
        ),
    }
)
"""vLLM's flags that aserve has under the same name, and that change what a client sees."""


@cache
def given() -> dict[str, Any]:
    """What vllm_tests.py passes."""
    return dict(json.loads(os.environ["TESTS_OF_ASERVE"]))


def write(**line: Any) -> None:
    with Path(given()["outcomes"]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def grouped(words: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Flags with their values: --a 1 --b --c=2 is (--a, [1]), (--b, []), (--c, [2])."""
    name = ""
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            if name:
                yield name, values
            name, is_joined, value = word.partition("=")
            name = name.replace("_", "-")
            values = [value] if is_joined else []
        else:
            values.append(word)
    if name:
        yield name, values


def translated(words: Iterable[str]) -> list[str]:
    """The flags that aserve takes; the others are written down."""
    kept: list[str] = []
    for name, values in grouped(map(str, words)):
        if name in FORWARDED:
            kept += [name, *values]
        else:
            write(flag=name)
    return kept


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def wait_until_ready(process: "subprocess.Popen[bytes]", url: str) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=5).close()
            return
        except OSError:
            if process.poll() is not None:
                raise RuntimeError(f"aserve ended with status {process.returncode}") from None
            if time.monotonic() > deadline_s:
                raise RuntimeError("aserve did not start in time") from None
            time.sleep(0.2)


def serving(original: type) -> type:
    """vLLM's class for a server under test, clients and all, whose process is aserve."""

    class AServer(original):  # type: ignore[misc]
        proc: Any = None

        def __init__(self, model: str, vllm_serve_args: list[str], **settings: Any) -> None:
            environ = os.environ | (settings.get("env_dict") or {})
            words = translated(vllm_serve_args)
            flags = dict(grouped(words))
            self.uds = None
            self.show_hidden_metrics = False
            self.host = flags.get("--host", ["127.0.0.1"])[0]
            self.port = int(flags.get("--port", [free_port()])[0])
            words += ["--port", str(self.port)]
            if "VLLM_API_KEY" in environ:
                words += ["--api-key", environ["VLLM_API_KEY"]]
            if "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in environ:
                words += ["--lora-root", "/"]
            if settings.get("override_hf_configs"):
                words += ["--hf-overrides", json.dumps(settings["override_hf_configs"])]
            self.proc = subprocess.Popen([*given()["command"], "--model", model, *words], env=environ)
            try:
                wait_until_ready(self.proc, self.url_root)
            except BaseException:
                self.__exit__()
                raise

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *raised: object) -> None:
            self.proc.send_signal(signal.SIGTERM)
            try:
                self.proc.wait(20)
            except subprocess.TimeoutExpired:
                self.proc.kill()
                self.proc.wait()

    return AServer


def asks_a_server(item: pytest.Function) -> bool:
    """Whether the test, or a fixture that it uses, starts a server."""
    fixtures = [definition.func for known in item._fixtureinfo.name2fixturedefs.values() for definition in known]
    return any(STARTS.search(inspect.getsource(inspect.unwrap(function))) for function in (item.function, *fixtures))


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before any file of the tests has imported the class."""
    utils: Any = importlib.import_module("tests.utils")
    utils.RemoteOpenAIServer = serving(utils.RemoteOpenAIServer)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out_places = set(given()["left_out"])
    left_out = []
    for item in items:
        place = item.nodeid.partition("[")[0]
        if place in left_out_places or place.partition("::")[0] in left_out_places:
            write(test=item.nodeid, outcome="left out", why="")
        elif isinstance(item, pytest.Function) and not asks_a_server(item):
            write(test=item.nodeid, outcome="white box", why="")
        else:
            continue
        left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        write(test=report.nodeid, outcome="failed", why=last_line(report))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        write(test=report.nodeid, outcome=report.outcome, why=last_line(report))


def last_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    """What went wrong, in one line."""
    lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
    return lines[0][1:].strip() if lines else report.longreprtext[-200:]

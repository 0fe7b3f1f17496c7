"""Hypothesis profiles, threads and garbage of processes side by side, and what lets tests run without pytest's plugins.

The usual profile repeats the same examples in every run; `thorough` looks for new ones.

pytest tests/scheduler --hypothesis-profile thorough
"""

import gc
import os
import sys
from collections import Counter
from collections.abc import Generator
from contextlib import suppress

import pytest

# What a process imports is kept compiled for the hundreds that tests start, also where containers have it thrown away.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if "PYTEST_XDIST_WORKER" in os.environ:  # one of as many processes as there are cores; torch would have each take all
    os.environ.setdefault("OMP_NUM_THREADS", "1")

with suppress(ModuleNotFoundError):  # tests of kernels need none of it, and run where there is nothing but torch
    from hypothesis import settings

    settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=50, stateful_step_count=40)
    settings.register_profile("thorough", deadline=None, max_examples=5_000, stateful_step_count=60)
    settings.load_profile("fixed")

SWEPT = "swept"
"""The property of a test of the sweep (tests/faults) that says how many cases there were, and what became of them."""
MANY_OBJECTS = 50_000
"""To go through so many takes the collector 10 ms."""
PLUGIN_OPTIONS = {
    "pytest_asyncio": ("asyncio_mode", "asyncio_default_fixture_loop_scope"),
    "pytest_timeout": ("timeout",),
}
"""By module, those that pyproject.toml sets."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """What a plugin that is not loaded would have declared: `--strict-config` refuses an option that nobody knows."""
    loaded = {getattr(plugin, "__name__", "").partition(".")[0] for plugin in pluginmanager.get_plugins()}
    for module, names in PLUGIN_OPTIONS.items():
        if module not in loaded:
            for name in names:
                parser.addini(name, f"of {module}, which is not loaded")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the tests of the sweep come to together, in whichever processes they ran."""
    total: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", ()):
        total += Counter(dict(report.user_properties).get(SWEPT, {}))
    if total:
        terminalreporter.write_line("swept: " + ", ".join(f"{num} {what}" for what, num in total.items()))


@pytest.fixture(autouse=True, scope="module")
def _frozen_garbage() -> None:
    """What earlier tests have had imported, and keep, is left out by the collector too; see `pytest_collection`."""
    if len(gc.get_objects()) > MANY_OBJECTS:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What torch, transformers and the tests' modules make stays until the process ends: the collector leaves it out.

    A runner that closes collects garbage; with a million objects more to go through, that takes half a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()

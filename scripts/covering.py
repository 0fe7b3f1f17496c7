"""Which tests run which lines of aserve, written down by a plugin of pytest. Run it where the folder aserve is.

    PYTHONPATH=scripts COVERING=FOLDER python -m pytest -p covering

Lines are followed by coverage.py, whose contexts are the tests' functions, in the processes that tests start too. A
test that fails is not written down. FOLDER gets data files of coverage.py, and tests-*.jsonl: a function's seconds.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from coverage import Coverage, CoverageData

LINES = "lines"
CONFIG = """
[run]
source = {source}
data_file = {folder}/{lines}
parallel = true
sigterm = true
context = ${{COVERING_TEST-}}
disable_warnings = no-data-collected,module-not-imported,already-imported,module-not-measured
"""


class Covering:
    """The map that was gathered in a folder, of the tree at `root`."""

    def __init__(self, folder: Path, root: Path) -> None:
        """FileNotFoundError where nothing has been gathered."""
        self._root = root
        self.seconds: dict[str, float] = defaultdict(float)
        for path in folder.glob("tests-*.jsonl"):
            for line in path.read_text().splitlines():
                test, seconds = json.loads(line)
                self.seconds[test] += seconds
        if not self.seconds or not (folder / LINES).exists():
            raise FileNotFoundError(f"{folder} holds no map of tests")
        self._data = CoverageData(str(folder / LINES))
        self._data.read()

    def tests_of(self, path: str) -> dict[int, set[str]]:
        """By line of a file (a path below the repository's root), the passing tests that ran it."""
        by_line = self._data.contexts_by_lineno(str(self._root / path))
        return {line: {test for test in tests if test in self.seconds} for line, tests in by_line.items()}


def combine(folder: Path) -> None:
    """Make one data file of those that the processes have left."""
    coverage = Coverage(data_file=str(folder / LINES), config_file=False)
    coverage.combine([str(folder)])
    coverage.save()


class Plugin:
    """Follows a session of pytest."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "coverage.ini"
        config.write_text(CONFIG.format(source=Path("aserve").resolve(), folder=folder, lines=LINES))
        os.environ["COVERAGE_PROCESS_START"] = str(config)  # for the processes that tests start
        self._coverage = Coverage(config_file=str(config), data_suffix=True)
        self._coverage.start()
        self._seconds = folder / f"tests-{os.getpid()}.jsonl"

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Lines of a test, its fixtures included, belong to its function."""
        test = function_of(item.nodeid)
        os.environ["COVERING_TEST"] = test
        self._coverage.switch_context(test)
        begin_s = time.perf_counter()
        num_failed = item.session.testsfailed
        yield
        if item.session.testsfailed == num_failed:
            with self._seconds.open("a") as file:
                file.write(json.dumps([test, round(time.perf_counter() - begin_s, 4)]) + "\n")

    def pytest_unconfigure(self) -> None:
        """All tests have run."""
        self._coverage.stop()
        self._coverage.save()


def function_of(test_id: str) -> str:
    """A test's id without its parameters."""
    return test_id.partition("[")[0]


def pytest_configure(config: pytest.Config) -> None:
    """Begin: what tests import from here on is followed."""
    if not hasattr(config, "workerinput") and getattr(config.option, "dist", "no") != "no":
        return  # the process that hands tests out runs none
    config.pluginmanager.register(Plugin(Path(os.environ["COVERING"])))

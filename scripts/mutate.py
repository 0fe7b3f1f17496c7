"""How many small wrong changes of aserve its tests notice: mutation testing over all rooms, from a seed.

    python scripts/mutate.py --gather                  # once: which tests run which lines, by coverage.py
    python scripts/mutate.py --count 300 --seed 0      # 300 mutants, a table by room; 1 below 92 %
                                                       # the same ones while their lines are, whatever else changes
    python scripts/mutate.py --at aserve/mailbox.py:40

Each mutant (mutants.py) is put into a copy of the tree, and the tests that run its lines are run, the quickest and
nearest first, until one fails. A mutant is caught by a test that fails, by one that hangs past the limit or ends the
process, or by a copy that cannot be imported. The tests that caught are run once more on the tree as it is: what fails
there caught nothing. What survives is printed with its line.
"""

import argparse
import ast
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Final, NamedTuple

from covering import Covering, combine
from mutants import Mutant, mutants_of

ROOT: Final = Path(__file__).parents[1]
SECONDS_OF_TESTS: Final = 60.0
"""Of a mutant, by the map's times. A line that more tests run is run by the quickest of them."""
FIRST_SECONDS: Final = 4.0
"""Of the tests that are tried in a process of their own, before the others are imported."""
FARTHER_S: Final = 1.0
"""A test of another room waits as if it took so much longer."""
STARTING_S: Final = 30.0
"""For the interpreter, imports and collection on a busy machine."""
PATIENCE: Final = 3.0
"""How much longer the second try may take of tests that hang in the first."""
SLOWER: Final = 8.0
"""By how much tests may be slower than the map says before they count as hanging."""
KEPT: Final = (
    "aserve",
    "tests",
    "scripts",
    "examples",
    "docs",
    "ops",
    "pyproject.toml",
    "README.md",
    "CONTRIBUTING.md",
    "Makefile",
    "constraints.txt",
    ".dockerignore",
)
FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (tests/\S+?\.py(?:::[^\s\[]+)?)", re.MULTILINE)
OK: Final = 0
SURVIVED: Final = "survived"


class Place(NamedTuple):
    """A mutant of a file, given as a path below the repository's root."""

    path: str
    mutant: Mutant

    @property
    def room(self) -> str:
        """The package; of modules beside packages, "edges"."""
        parts = Path(self.path).parts
        return parts[1] if len(parts) > 2 else "edges"

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.mutant.old, self.mutant.new))
        return f"{self.path}:{self.mutant.line}  {self.mutant.kind:10}  {old[:70]}  ->  {new[:70]}"


class Outcome(NamedTuple):
    """how: "failed", "hung", "died", "import" or "survived". test: the one that failed."""

    place: Place
    how: str
    test: str | None = None


def places(root: Path, rooms: Sequence[str] = ()) -> list[Place]:
    """Every mutant of every file of aserve, or of some rooms of it."""
    found = []
    for file in sorted((root / "aserve").rglob("*.py")):
        path = file.relative_to(root).as_posix()
        found += [Place(path, mutant) for mutant in mutants_of(file.read_text())]
    return [place for place in found if not rooms or place.room in rooms]


def draw(root: Path, everything: Sequence[Place], count: int, seed: int) -> list[Place]:
    """So many of the places, in the order of a hash of what each changes, its line, and the seed.

    Another commit is asked for the same ones, but for those whose lines it has changed.
    """
    seen: Counter[tuple[str, ...]] = Counter()
    ranked = []
    lines = cache(lambda path: (root / path).read_text().splitlines())
    for place in everything:
        mutant = place.mutant
        words = place.path, lines(place.path)[mutant.line - 1].strip(), mutant.kind, mutant.old, mutant.new
        seen[words] += 1  # the same may stand twice in a file
        ranked.append((hashlib.sha256(repr((seed, seen[words], words)).encode()).digest(), place))
    return [place for _, place in sorted(ranked)[:count]]


def lines_of(source: str, line: int) -> range:
    """The lines of the innermost function's body that has a line; none for what is run on import alone."""
    innermost = range(0)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            body = range(node.body[0].lineno, node.end_lineno + 1)
            if line in body and (not innermost or len(body) < len(innermost)):
                innermost = body
    return innermost


class Chooser:
    """Which tests to run against a mutant."""

    def __init__(self, root: Path, covering: Covering) -> None:
        self._root, self._covering = root, covering
        self._tests_of = cache(covering.tests_of)

    def choose(self, place: Place) -> list[str]:
        """Functions of tests, the likeliest first: those that run the line, else its function, else its file."""
        by_line = self._tests_of(place.path)
        mutant = place.mutant
        body = lines_of((self._root / place.path).read_text(), mutant.line)
        own = range(mutant.line, mutant.line + mutant.old.count("\n") + 1) if body else range(0)
        for lines in (own, body, by_line.keys()):
            if found := set().union(*(by_line.get(line, ()) for line in lines)):
                return self._quickest(found, place)
        return []

    def _quickest(self, tests: set[str], place: Place) -> list[str]:
        near = f"tests/{place.room}/" if place.room != "edges" else f"tests/test_{Path(place.path).stem}"
        seconds = self._covering.seconds
        ordered = sorted(tests, key=lambda test: (seconds[test] + FARTHER_S * (not test.startswith(near)), test))
        total_s = 0.0
        chosen: list[str] = []
        for test in ordered:
            total_s += seconds[test]
            if chosen and total_s > SECONDS_OF_TESTS:
                break
            chosen.append(test)
        return chosen

    def stages(self, tests: list[str]) -> Iterator[tuple[list[str], float]]:
        """The tests in two parts, and how long each may take: most mutants do not get past the first."""
        total_s, first = 0.0, 0
        for first, test in enumerate(tests, 1):  # noqa: B007
            total_s += self._covering.seconds[test]
            if total_s > FIRST_SECONDS:
                break
        for part in (tests[:first], tests[first:]):
            if part:
                yield part, STARTING_S + SLOWER * sum(self._covering.seconds[test] for test in part)


class Tree:
    """A copy of the tree, in which mutants take turns."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._folder = folder
        self._num_writes = 0
        for name in KEPT:
            source = root / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, folder / name)

    @contextmanager
    def holding(self, place: Place) -> Iterator[None]:
        """While inside, the file has the mutant."""
        path = self._folder / place.path
        source = path.read_text()
        self._write(path, place.mutant.applied(source))
        try:
            yield
        finally:
            self._write(path, source)

    def _write(self, path: Path, text: str) -> None:
        """Each time with a time of its own, by which Python tells that its bytecode is an old one's."""
        path.write_text(text)
        self._num_writes += 1
        os.utime(path, (self._num_writes, self._num_writes))

    def run(self, tests: Sequence[str], limit_s: float, *options: str) -> tuple[int, str]:
        """pytest's exit status and what it printed. TimeoutError past the limit."""
        listed = self._folder / "chosen.txt"
        listed.write_text("\n".join(by_file(tests)))
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", *options, f"@{listed}"]
        env = os.environ | {"PYTHONPATH": f"{self._folder}:{self._folder / 'scripts'}", "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            command,
            cwd=self._folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as child:
            try:
                output, _ = child.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                raise TimeoutError from None
            finally:
                with suppress(ProcessLookupError):  # those that a test has started and not ended
                    os.killpg(child.pid, signal.SIGKILL)
        return child.returncode, output

    def try_mutant(self, place: Place, chooser: Chooser) -> Outcome:
        """Run the mutant's tests until one fails."""
        with self.holding(place):
            for tests, limit_s in chooser.stages(chooser.choose(place)):
                try:
                    status, output = self._run_patiently(tests, limit_s)
                except TimeoutError:
                    return Outcome(place, "hung")
                if status == OK:
                    continue
                if status < 0:  # by a signal: a wrong write, say
                    return Outcome(place, "died")
                if failed := FAILED.search(output):
                    return Outcome(place, "failed", failed[1])
                if "ImportError while loading conftest" in output:
                    return Outcome(place, "import")
                raise RuntimeError(f"pytest ended with {status} at {place}:\n{output[-3000:]}")
        return Outcome(place, SURVIVED)

    def _run_patiently(self, tests: Sequence[str], limit_s: float) -> tuple[int, str]:
        """Until one fails; once more where it takes too long, which may be the machine's doing: then TimeoutError."""
        try:
            return self.run(tests, limit_s, "-x")
        except TimeoutError:
            return self.run(tests, PATIENCE * limit_s, "-x")

    def proven(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The outcomes, less those whose test fails on the tree as it is."""
        tests = sorted({outcome.test for outcome in outcomes if outcome.test})
        if not tests:
            return list(outcomes)
        _, output = self.run(tests, 3600.0)
        wrong = {found[1] for found in FAILED.finditer(output)}
        return [outcome._replace(how=SURVIVED) if outcome.test in wrong else outcome for outcome in outcomes]


def by_file(tests: Sequence[str]) -> list[str]:
    """The tests in the order of their files' first, so that what a module sets up is set up once."""
    files: dict[str, list[str]] = {}
    for test in tests:
        files.setdefault(test.partition("::")[0], []).append(test)
    return [test for members in files.values() for test in members]


def try_all(root: Path, chosen: Sequence[Place], chooser: Chooser, num_jobs: int) -> list[Outcome]:
    """The outcomes, in order; each of the jobs has a tree of its own."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        free: SimpleQueue[Tree] = SimpleQueue()
        for job in range(num_jobs):
            free.put(Tree(root, Path(folder) / str(job)))

        def attempt(place: Place) -> Outcome:
            tree = free.get()
            try:
                outcome = tree.try_mutant(place, chooser)
            finally:
                free.put(tree)
            print(f"{outcome.how:9}{place}  {outcome.test or ''}", file=sys.stderr, flush=True)
            return outcome

        with ThreadPoolExecutor(num_jobs) as pool:
            outcomes = list(pool.map(attempt, chosen))
        return free.get().proven(outcomes)


def table(outcomes: Sequence[Outcome]) -> str:
    """By room: mutants, how many were caught, the share of them."""
    rooms = sorted({outcome.place.room for outcome in outcomes})
    lines = [f"{'room':12}{'mutants':>8}{'caught':>8}{'share':>8}"]
    for room in [*rooms, "all"]:
        hows = [outcome.how for outcome in outcomes if room in ("all", outcome.place.room)]
        caught = len(hows) - hows.count(SURVIVED)
        lines.append(f"{room:12}{len(hows):8}{caught:8}{caught / len(hows):8.1%}")
    return "\n".join(lines)


def gather(root: Path, folder: Path, options: Sequence[str]) -> None:
    """Run the suite under coverage.py, and write down which test runs which line."""
    shutil.rmtree(folder, ignore_errors=True)
    env = os.environ | {"PYTHONPATH": f"{root}:{Path(__file__).parent}", "COVERING": str(folder)}
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "covering", *options], cwd=root, env=env, check=False)
    combine(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 where too many survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="mutants, drawn from all that there are")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="*", default=(), help="packages of aserve, or edges; all by default")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--threshold", type=float, default=0.92, help="the share that has to be caught")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree; this one by default")
    parser.add_argument("--map", type=Path, default=ROOT / ".mutation", help="the folder of the map of tests")
    parser.add_argument(
        "--gather", nargs=argparse.REMAINDER, help="gather the map with these options of pytest, and end"
    )
    parser.add_argument("--at", nargs="+", metavar="FILE:LINE", help="all mutants of these lines, in place of a draw")
    args = parser.parse_args(arguments)
    if args.gather is not None:
        gather(args.root, args.map.absolute(), args.gather)
        return 0
    chooser = Chooser(args.root, Covering(args.map, args.root))
    everything = places(args.root, args.rooms)
    if args.at is not None:
        chosen = [place for place in everything if f"{place.path}:{place.mutant.line}" in args.at]
    else:
        chosen = draw(args.root, everything, args.count, args.seed)
    outcomes = try_all(args.root, chosen, chooser, args.jobs)
    survived = [outcome.place for outcome in outcomes if outcome.how == SURVIVED]
    print(table(outcomes), *map(str, sorted(survived)), sep="\n")
    return int(len(survived) > (1 - args.threshold) * len(outcomes))


if __name__ == "__main__":
    sys.exit(main())

"""mutate.py: what it changes, which tests it runs against that, and what it says came of it."""

import ast
import random
from pathlib import Path

import mutate
import pytest
from mutants import mutants_of

ROOT = Path(__file__).parents[2]


def changes(source):
    return [(mutant.line, mutant.kind, mutant.old, mutant.new) for mutant in mutants_of(source)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(("a < b", "(a <= b)"), ("a >= b", "(a > b)"), ("a == b", "(a != b)"), ("a not in b", "(a in b)")),
        *(("a is None", "(a is not None)"), ("a + b", "(a - b)"), ("a // b", "(a * b)"), ("a % b", "(a * b)")),
        *(("a and b", "(a or b)"), ("a or b", "(a and b)"), ("not a", "a"), ("True", "False"), ("7", "8")),
        *(("0.5", "1.5"), ("1e+30", "2e+30"), ("f(a, b)", "(f(b, a))"), ("f(a, b, c=d)", "(f(b, a, c=d))")),
    ],
)
def test_an_expression_and_what_it_becomes(old, new):
    [found] = [change for change in changes(f"def g():\n    return {old}\n") if change[2] == old]
    assert (found[0], found[3]) == (2, new)


@pytest.mark.parametrize(
    "statement", ["f()", "await f()", "x.a = b", "x[a] = b", "x += b", "del x[a]", "raise ValueError"]
)
def test_a_statement_that_is_removed(statement):
    assert (2, "removal", statement, "pass") in changes(f"async def g():\n    {statement}\n")


@pytest.mark.parametrize(
    "source",
    [
        "assert a < b",
        "LIMIT = 3",
        "LIMIT: int = 3",
        "__slots__ = ()",
        "class A(B, frozen=True):\n    pass",
        "@f(1, 2)\ndef g(a: c[3]) -> d[4]:\n    return a",
        "def __repr__(self):\n    return 1 + a",
        "def g():\n    return f'{a + 1}'",
        "def g():\n    return 'a' + b",
        "def g():\n    return max(a, b).min",
        "if TYPE_CHECKING:\n    f(1, 2)",
        "def g():\n    x = f\n    return x",
        "def g(a, b):\n    return f(*a, b)",
    ],
)
def test_what_is_left_alone(source):
    assert [change for change in changes(source) if change[1] != "arithmetic" or "max" not in change[2]] == []


def test_conditions_are_turned_round_once():
    found = changes(
        "def g():\n    if a:\n        return b\n    if not c:\n        return d\n    return e if f == h else i\n"
    )
    assert found == [(2, "logic", "a", "(not a)"), (4, "logic", "not c", "c"), (6, "comparison", "f == h", "(f != h)")]


def test_what_neighbours_would_bind_closer_gets_parentheses():
    """`x * a + b` for `x * (a - b)` would be another mutant than was meant."""
    source = "def g():\n    return a * b and not (c or d)\n"
    meant = {
        "return (a // b) and not (c or d)",
        "return (a * b or not (c or d))",
        "return a * b and (c or d)",
        "return a * b and not ((c and d))",
    }
    assert {mutant.applied(source).splitlines()[1].strip() for mutant in mutants_of(source)} == meant


def test_letters_of_many_bytes_move_nothing():
    source = "def g():\n    é = 'ü'; return h(é, 1)\n"
    assert [mutant.applied(source) for mutant in mutants_of(source)] == [
        "def g():\n    é = 'ü'; return (h(1, é))\n",
        "def g():\n    é = 'ü'; return h(é, 2)\n",
    ]


@pytest.mark.thorough
def test_mutants_of_aserve_are_programs_and_differ_in_what_they_say():
    everything = mutate.places(ROOT)
    assert len(everything) > 5000
    assert {place.room for place in everything} >= {"scheduler", "runner", "kernels", "http", "edges", "core"}
    for place in random.Random(0).sample(everything, 60):
        source = (ROOT / place.path).read_text()
        tree = ast.parse(place.mutant.applied(source))
        assert ast.dump(tree) != ast.dump(ast.parse(source)), place


def test_tests_of_one_file_are_run_together():
    assert mutate.by_file(["b::1", "a::1", "b::2", "a::2"]) == ["b::1", "b::2", "a::1", "a::2"]


def test_the_body_of_the_innermost_function_has_a_line():
    source = "def f(a=1):\n    b\n    def g():\n        c\n    d\n"
    assert [list(mutate.lines_of(source, line)) for line in (1, 2, 4, 5)] == [[], [2, 3, 4, 5], [4], [2, 3, 4, 5]]


class Map:
    """A map of tests: seconds by test, tests by line."""

    def __init__(self, seconds, by_line):
        self.seconds, self._by_line = seconds, by_line

    def tests_of(self, path):
        return self._by_line


def test_the_quickest_and_nearest_run_first_and_no_more_than_the_time_allows(tmp_path, monkeypatch):
    monkeypatch.setattr(mutate, "SECONDS_OF_TESTS", 5.0)
    (tmp_path / "aserve/room").mkdir(parents=True)
    (tmp_path / "aserve/room/mod.py").write_text("def f(a):\n    return a + 1\n\ndef g(a):\n    return a - 1\n")
    near, far, slow, never = (
        "tests/room/test_a.py::a",
        "tests/x/test_b.py::b",
        "tests/room/test_a.py::s",
        "tests/c.py::c",
    )
    seconds = {near: 0.9, far: 0.1, slow: 3.5, never: 3.0}
    by_line = {1: {never}, 2: {near, far, slow, never}, 4: {never}}
    chooser = mutate.Chooser(tmp_path, Map(seconds, by_line))
    of_f, *_ = (place for place in mutate.places(tmp_path) if place.mutant.line == 2)
    of_g, *_ = (place for place in mutate.places(tmp_path) if place.mutant.line == 5)
    assert chooser.choose(of_f) == [near, far, slow]
    assert set(chooser.choose(of_g)) == {near, far, slow}, "no test runs the line: those of the file"
    assert [tests for tests, _ in chooser.stages([near, far, slow])] == [[near, far, slow]]
    assert [tests for tests, _ in chooser.stages([slow, near, far])] == [[slow, near], [far]]


MODULE = """
def is_small(n):
    return n < 3


def unseen(n):
    return n + 1
"""
TESTS = """
from aserve.room.mod import is_small, unseen


def test_small():
    assert is_small(2) and not is_small(3)


def test_unseen():
    assert unseen(5)


def test_bad():
    assert unseen(1) == 7
"""
TEST = "tests/room/test_mod.py::test_"


@pytest.fixture
def small_tree(tmp_path, monkeypatch):
    """A tree of one module, whose tests see a boundary, look at nothing, and fail; they need no plugins."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for folder in ("aserve/room", "tests/room"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "aserve/__init__.py").touch()  # else the package that is installed would be found before it
    (tmp_path / "aserve/room/mod.py").write_text(MODULE)
    (tmp_path / "tests/room/test_mod.py").write_text(TESTS)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\ntestpaths = ['tests']\n")
    return tmp_path


@pytest.mark.slow
def test_a_draw_is_the_same_while_lines_are(tmp_path):
    """Above, below and in another file: what is drawn of the rest stays, and a line that stands twice is two places."""
    file = tmp_path / "aserve/room/mod.py"
    file.parent.mkdir(parents=True)
    lines = [f"    a{n} = b{n} + {n}" for n in range(40)] + ["    a = b + 1"] * 2

    def drawn(body: list[str], seed: int = 0) -> list[str]:
        file.write_text("\n".join(["def f():", *body]) + "\n")
        everything = mutate.places(tmp_path)
        chosen = mutate.draw(tmp_path, everything, 20, seed)
        assert len(set(chosen)) == len(chosen) == 20
        return [body[place.mutant.line - 2] + place.mutant.new for place in chosen]

    before = drawn(lines)
    assert drawn(["    x = []", *lines, "    y = [x]"]) == before
    assert drawn(lines, seed=1) != before
    kept = [words for words in before if lines[3] not in words]
    assert drawn([line for line in lines if line != lines[3]])[: len(kept)] == kept


def test_what_is_looked_at_is_caught_and_what_is_not_survives_and_is_told(small_tree, capsys):
    where = ["--root", str(small_tree), "--map", str(small_tree / "map")]
    assert mutate.main([*where, "--gather"]) == 0
    seen, unseen = "aserve/room/mod.py:3", "aserve/room/mod.py:7"
    assert mutate.main([*where, "--threshold", "0.5", "--at", seen, unseen]) == 0
    assert mutate.main([*where, "--threshold", "0.51", "--at", unseen]) == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["room", "4", "2", "50.0%"] in rows
    assert ["all", "4", "2", "50.0%"] in rows
    survivors = [row[:2] + row[3:] for row in rows if row[0] == unseen]
    assert survivors[:2] == [[unseen, "arithmetic", "+", "1", "->", "(n", "-", "1)"], [unseen, "constant", "->", "2"]]
    assert (small_tree / "aserve/room/mod.py").read_text() == MODULE


@pytest.mark.slow
def test_what_does_not_end_is_caught_and_what_fails_without_a_mutant_is_not(small_tree, tmp_path_factory):
    tree = mutate.Tree(small_tree, tmp_path_factory.mktemp("copy"))
    place = mutate.places(small_tree)[0]

    class Hasty(mutate.Chooser):
        def stages(self, tests):
            yield tests, 0.01

    hasty = Hasty(small_tree, Map({f"{TEST}small": 1.0}, {3: {f"{TEST}small"}}))
    assert tree.try_mutant(place, hasty) == mutate.Outcome(place, "hung")
    caught = [mutate.Outcome(place, "failed", f"{TEST}{name}") for name in ("small", "bad")]
    assert [outcome.how for outcome in tree.proven(caught)] == ["failed", "survived"]


@pytest.mark.slow
def test_what_ends_the_process_is_caught(small_tree, tmp_path_factory):
    """The fault: a kernel that writes where it should not ended the whole run with an error."""
    (small_tree / "tests/room/test_mod.py").write_text(
        "import os\n\nfrom aserve.room.mod import is_small\n\n\ndef test_small():\n    is_small(3) and os.abort()\n"
    )
    tree = mutate.Tree(small_tree, tmp_path_factory.mktemp("copy"))
    place = next(place for place in mutate.places(small_tree) if place.mutant.kind == "comparison")
    chooser = mutate.Chooser(small_tree, Map({f"{TEST}small": 1.0}, {3: {f"{TEST}small"}}))
    assert tree.try_mutant(place, chooser) == mutate.Outcome(place, "died")

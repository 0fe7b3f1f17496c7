"""The invariants' numbers: each defined once, asserted under its number, and shown to be noticed when it is broken.

An invariant is defined in a module's docstring ("I4 whatever is neither sealed ..."), cited where it is asserted, in
the package or by the oracles of the tests ("I4: block 3 ..."), and expected by a test that plants a fault ("I4").
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEFINITION = re.compile(r"\bI(\d+) +[a-z]")
CITATION = re.compile(r"\bI(\d+)\b")


@cache
def sources(folder: str) -> list[tuple[Path, str]]:
    """Without those of models, where I8 and I32 are types."""
    paths = [path for path in sorted((ROOT / folder).rglob("*.py")) if path != Path(__file__)]
    return [(path, path.read_text()) for path in paths if "models" not in path.relative_to(ROOT).parts]


@cache
def modules(folder: str) -> list[ast.Module]:
    """Of the sources that have anything like a number of an invariant: to parse them all takes ten seconds."""
    return [ast.parse(text) for _, text in sources(folder) if re.search(r"I\d", text)]


def texts(tree: ast.AST) -> Iterator[str]:
    """All strings, of formatted ones the fixed parts."""
    return (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))


def numbers(pattern: re.Pattern[str], text: str) -> list[int]:
    return [int(number) for number in pattern.findall(text)]


def raised(tree: ast.Module) -> list[str]:
    """What its assertions say, and what it raises itself as one."""
    said = [node.msg for node in ast.walk(tree) if isinstance(node, ast.Assert) and node.msg is not None]
    said += [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
    return [text for each in said for text in texts(each)]


def test_each_is_defined_once_and_none_is_left_out() -> None:
    defined = Counter(
        number for tree in modules("aserve") for number in numbers(DEFINITION, ast.get_docstring(tree) or "")
    )
    assert sorted(defined.elements()) == list(range(1, max(defined) + 1))


def test_whoever_cites_one_cites_one_that_there_is() -> None:
    known = {n for tree in modules("aserve") for n in numbers(DEFINITION, ast.get_docstring(tree) or "")}
    pages = [(path, path.read_text()) for path in (ROOT / "docs").rglob("*.md")]
    files = [*pages, *sources("aserve"), *sources("tests")]
    unknown = [(path.name, number) for path, text in files for number in set(numbers(CITATION, text)) - known]
    assert unknown == []


def test_each_is_asserted_under_its_number_and_noticed_where_a_fault_is_planted() -> None:
    """Catches an invariant that nobody checks, and a check that has never been seen to fail."""
    known = {n for tree in modules("aserve") for n in numbers(DEFINITION, ast.get_docstring(tree) or "")}
    said = [text for tree in (*modules("aserve"), *modules("tests")) for text in raised(tree)]
    assert known - {number for text in said for number in numbers(re.compile(r"^I(\d+):"), text)} == set()
    expected = [text for tree in modules("tests") for text in (set(texts(tree)) - set(raised(tree)))]
    planted = {number for text in expected for number in numbers(re.compile(r"^I(\d+)\b"), text)}
    assert known - planted == set()

"""Lines by room of this repository: of code, of docstrings and comments, and blank ones, at two commits side by side.

A room is a folder, of the package one below it; files of the package itself are the room "aserve". A line with code and
a comment is a line of code; one that is blank is blank, in a docstring too. Of C++ whatever is not blank is code.

    python scripts/loc.py [BEFORE [AFTER]]        by default f15e067 and HEAD
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections import defaultdict
from functools import reduce
from pathlib import PurePath
from typing import NamedTuple

BEFORE = "f15e067"
ROOMS = ("aserve", "tests", "scripts", "examples")
SUFFIXES = (".py", ".cpp", ".h")


class Lines(NamedTuple):
    """longest: of the room's files, with all its lines."""

    code: int = 0
    told: int = 0
    blank: int = 0
    files: int = 0
    longest: int = 0

    def plus(self, other: "Lines") -> "Lines":
        """Of both."""
        code, told, blank, files, _ = (a + b for a, b in zip(self, other, strict=True))
        return Lines(code, told, blank, files, max(self.longest, other.longest))


def lines_of(path: str, source: str) -> Lines:
    """Of one file. Raises SyntaxError for Python that is none."""
    lines = source.splitlines()
    blank = {number for number, line in enumerate(lines, start=1) if not line.strip()}
    told = told_in(source) - blank if path.endswith(".py") else set()
    return Lines(len(lines) - len(blank) - len(told), len(told), len(blank), 1, len(lines))


def told_in(source: str) -> set[int]:
    """The numbers of lines that have a comment or a string that nobody uses, and nothing else."""
    told: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            told.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            told.add(token.start[0])
    return told


def room_of(path: str) -> str | None:
    """None for what is not counted."""
    parts = PurePath(path).parts
    if parts[0] not in ROOMS or not path.endswith(SUFFIXES):
        return None
    return "/".join(parts[:2]) if parts[0] == "aserve" and len(parts) > 2 else parts[0]


def counted(commit: str) -> dict[str, Lines]:
    """By room. Raises CalledProcessError for a commit that git does not know."""
    rooms: defaultdict[str, Lines] = defaultdict(Lines)
    for path in git("ls-tree", "-r", "--name-only", commit).splitlines():
        if (room := room_of(path)) is not None:
            rooms[room] = rooms[room].plus(lines_of(path, git("show", f"{commit}:{path}")))
    return rooms


def git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout


def row(name: str, both: tuple[Lines, Lines]) -> str:
    cells = [number for one in both for number in (one.code, one.told, one.files, one.longest)]
    return f"| {name} | {' | '.join(map(str, cells))} |"


def main() -> None:
    before, after = [*sys.argv[1:], *(BEFORE, "HEAD")[len(sys.argv) - 1 :]]
    then, now = counted(before), counted(after)
    print(f"| room | {before}: code | told | files | longest | {after}: code | told | files | longest |")
    print("|---|" + "---:|" * 8)
    for room in sorted(then.keys() | now.keys()):
        print(row(room, (then.get(room, Lines()), now.get(room, Lines()))))
    of_package = [[lines for room, lines in rooms.items() if room.startswith("aserve")] for rooms in (then, now)]
    print(
        row("all of aserve", (reduce(Lines.plus, of_package[0], Lines()), reduce(Lines.plus, of_package[1], Lines())))
    )


if __name__ == "__main__":
    main()

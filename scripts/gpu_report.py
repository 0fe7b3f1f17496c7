"""The table at the end of gpu_check.sh: how each step ended, then what the tests and benchmarks found.

python scripts/gpu_report.py FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

HIDDEN: Final = ("bench", "commit", "machine")


def results(log: Path) -> list[dict[str, Any]]:
    """The JSON lines of a benchmark's log."""
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"bench"')]


def cells(result: dict[str, Any]) -> list[str]:
    """A result as the cells of a row: its benchmark, then each figure with its name."""
    return [str(result["bench"]), *(f"{name}={value}" for name, value in result.items() if name not in HIDDEN)]


def aligned(rows: list[list[str]]) -> str:
    """Rows of cells, one below the other."""
    widths = [
        max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(max(map(len, rows), default=0))
    ]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows
    )


def main() -> None:
    folder = Path(sys.argv[1])
    logs = sorted(folder.glob("*.log"))
    found = [result for log in logs for result in results(log)]
    (folder / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in found))
    print((folder / "steps.txt").read_text())
    for log in logs:
        if log.stem.endswith("_tests"):
            print(f"{log.stem}: {log.read_text().strip().splitlines()[-1:]}")
    print(aligned([cells(result) for result in found]))


if __name__ == "__main__":
    main()

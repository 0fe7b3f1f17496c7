"""The table at the end of gpu_check.sh: how each step ended, then every JSON line that the benchmarks printed.

    python scripts/gpu_report.py FOLDER
"""

import json
import sys
from pathlib import Path

HIDDEN = {"commit", "machine"}


def rows(folder: Path) -> list[dict[str, object]]:
    """The JSON lines of every log, in the order of the steps."""
    found = []
    for log in sorted(folder.glob("bench_*.log")):
        for line in log.read_text().splitlines():
            if line.startswith('{"bench"'):
                found.append(json.loads(line))  # noqa: PERF401  three levels of comprehension read worse
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    print((folder / "steps.txt").read_text())
    results = rows(folder)
    (folder / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))
    for result in results:
        cells = [f"{name}={value}" for name, value in result.items() if name not in HIDDEN]
        print(" | ".join(cells))


if __name__ == "__main__":
    main()

"""What gpu_check.sh found, from the stages.jsonl of one folder or of several runs: a stage's last record counts.

First every figure, then how each stage ended and why, then the goals: what was measured, or what is missing and why.
`--dry-run` judges nothing: its models are tiny. `--markdown` prints the table of docs/performance.md instead.

    python scripts/gpu_report.py FOLDER... [--dry-run | --markdown]
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gpu_goals import GOALS, Goal, MissingError, Result, Results
from gpu_stages import Record, read_records

HIDDEN: Final = ("bench", "commit", "machine", "extra_body", "url")
WIDEST_REASON: Final = 160

Records = Mapping[str, Record]


def merged(folders: Sequence[Path]) -> dict[str, Record]:
    """The records of several runs; of a stage that ran in more than one, the last."""
    records: dict[str, Record] = {}
    for folder in folders:
        records |= read_records(folder)
    return records


def results_of(records: Records) -> Results:
    """All results of all stages."""
    return Results([result for record in records.values() for result in record["results"]])


def judged(records: Records, *, dry_run: bool) -> list[dict[str, str]]:
    """The goals with what was measured, or with what is missing and why."""
    results = results_of(records)
    rows = []
    for goal in GOALS:
        try:
            verdict = goal.judge(results)
            met = "?" if dry_run else "met" if verdict.met else "NOT MET"
            measured = verdict.measured
        except MissingError as missing:
            met, measured = "missing", f"{missing}{_why(goal, records)}"
        rows.append({"name": goal.name, "goal": goal.goal, "measured": measured, "met": met})
    return rows


def reason(record: Record) -> str:
    """Why a stage did not end well, in a line: the errors of a benchmark's parts, or what it printed last."""
    errors = [f"{one['part']}: {one['error']}" for one in record["results"] if one["bench"] == "goals_failed"]
    said = [line.strip() for line in record["end"] if line.strip()]
    return "; ".join([record["ending"], *(errors or said[-1:])])[:WIDEST_REASON]


def cells(result: Result) -> list[str]:
    """A result as the cells of a row: its benchmark, then each figure with its name, a model by its folder's."""
    shown = {name: value for name, value in result.items() if name not in HIDDEN}
    if "model" in shown:
        shown["model"] = Path(shown["model"]).name
    return [str(result["bench"]), *(f"{name}={value}" for name, value in shown.items())]


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, one below the other."""
    widths = [
        max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(max(map(len, rows), default=0))
    ]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows
    )


def text(records: Records, rows: Sequence[Mapping[str, str]]) -> str:
    """The report. rows: the goals, judged."""
    endings = [
        [name, record["ending"], f"{record['seconds']} of {record['limit_s']} s", *_last_line(record)]
        for name, record in records.items()
    ]
    failures = [
        "\n".join([f"-- {name}: {record['ending']}", *record["end"]])
        for name, record in records.items()
        if record["ending"] not in ("ok", "not started")
    ]
    goals = [[row["name"], row["met"], row["goal"], row["measured"]] for row in rows]
    figures = [aligned([cells(result) for result in record["results"]]) for record in records.values()]
    tables = [*figures, aligned(endings), *failures, aligned(goals)]
    return "\n\n".join(table for table in tables if table)


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """The table of docs/performance.md. A goal that was not measured has an empty last cell."""
    lines = ["| | goal | roofline | estimate | measured |", "|---|---|---|---|---|"]
    for goal, row in zip(GOALS, rows, strict=True):
        measured = "" if row["met"] == "missing" else f"{row['measured']}: {row['met']}"
        lines.append(f"| {goal.name} | {goal.goal} | {goal.roofline} | {goal.estimate} | {measured} |")
    return "\n".join(lines)


def write(folder: Path, *, dry_run: bool) -> str:
    """results.jsonl, goals.json and report.txt of a folder's stages.jsonl; the report."""
    records = merged([folder])
    rows = judged(records, dry_run=dry_run)
    report = text(records, rows) + "\n"
    lines = [json.dumps(result) + "\n" for result in results_of(records).lines]
    (folder / "results.jsonl").write_text("".join(lines))
    (folder / "goals.json").write_text(json.dumps(rows, indent=1) + "\n")
    (folder / "report.txt").write_text(report)
    return report


def _why(goal: Goal, records: Records) -> str:
    """The first stage of a goal that did not end well, and its reason."""
    for name in goal.stages:
        if name not in records:
            return f" ({name} was not run)"
        if records[name]["ending"] != "ok":
            return f" ({name}: {reason(records[name])})"
    return ""


def _last_line(record: Record) -> list[str]:
    """What pytest says at its end, or the reason of a bad one."""
    if record["ending"] != "ok":
        return [reason(record)]
    return record["end"][-1:] if record["stage"].startswith("test") else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*", metavar="FOLDER")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    records = merged(args.folders)
    rows = judged(records, dry_run=args.dry_run)
    print(markdown(rows) if args.markdown else text(records, rows))


if __name__ == "__main__":
    main()

"""The table of a comparison: medians of each peer side by side, and ours over the best of theirs. Pure arithmetic."""

from collections.abc import Mapping, Sequence
from math import isfinite, nan
from typing import Final, NamedTuple

from aserve.load.figures import Figures

SHOWN: Final[Mapping[str, Sequence[str]]] = {
    "startup": ("to_socket_s", "to_ready_s", "to_first_token_s", "num_processes", "pss_mib"),
    "offline": ("output_tokens_per_s",),
    "batch": ("output_tokens_per_s",),
    "closed": (
        *("output_tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "per_token_p50_ms"),
        "same_read_fraction",
    ),
    "adapters": ("output_tokens_per_s", "ttft_p50_ms", "itl_p50_ms"),
    "structured": ("output_tokens_per_s", "ttft_p50_ms", "itl_p50_ms", "short_answers"),
    "prefix": ("ttft_first_ms", "ttft_later_p50_ms"),
    "trace": ("errors", "goodput_per_s", "output_tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "per_token_p50_ms"),
}
"""The figures of the table, by part. Of a closed loop there is a part for each concurrency: c1, c8, ..."""

NOT_COMPARED: Final = ("same_read_fraction", "errors", "short_answers")
"""Shown to judge the others by; there is no better or worse."""


class Row(NamedTuple):
    """One figure of one part: what each peer has (NaN for none), the best of the others, and ours over theirs."""

    part: str
    figure: str
    values: Mapping[str, float]
    best: str
    ratio: float


def figures_of(part: str) -> Sequence[str]:
    """What is shown of a part."""
    return SHOWN["closed" if part[0] == "c" and part[1:].isdigit() else part]


def more_is_better(figure: str) -> bool:
    """Of speeds; of times, memory and processes less is."""
    return figure.endswith("_per_s")


def rows(medians: Mapping[str, Mapping[str, Figures]], ours: str) -> list[Row]:
    """medians: by peer, then by part. A part that nobody has is left out; a peer that lacks one has NaN there."""
    parts = dict.fromkeys(part for by_part in medians.values() for part in by_part)
    found = []
    for part in parts:
        for figure in figures_of(part):
            values = {peer: by_part.get(part, {}).get(figure, nan) for peer, by_part in medians.items()}
            found.append(Row(part, figure, values, *_best(figure, values, ours)))
    return found


def _best(figure: str, values: Mapping[str, float], ours: str) -> tuple[str, float]:
    others = {peer: value for peer, value in values.items() if peer != ours and isfinite(value)}
    if not others or figure in NOT_COMPARED:
        return "", nan
    best = (max if more_is_better(figure) else min)(others, key=others.__getitem__)
    return best, values.get(ours, nan) / others[best] if others[best] else nan


def render(table: Sequence[Row], ours: str) -> str:
    """As text: a line a row, a column a peer, then the best of the others and the ratio."""
    if not table:
        return "nothing was measured"
    peers = list(table[0].values)
    lines = [["", "", *peers, "best other", f"{ours}/best"]]
    for row in table:
        numbers = [_number(row.values[peer]) for peer in peers]
        lines.append([row.part, row.figure, *numbers, row.best, _number(row.ratio)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _number(value: float) -> str:
    """Four significant digits, without an exponent."""
    if not isfinite(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"

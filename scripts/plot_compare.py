"""Plots of docs/bench: aserve beside its peers, one PNG a model, from the files that compare.py's output was kept in.

    python scripts/plot_compare.py docs/bench/2026-11-21-epyc-2-cores-q05.jsonl --out docs/bench/q05.png

matplotlib is not among the development dependencies: `pip install matplotlib` first.
"""

import argparse
import json
from pathlib import Path
from typing import Any

PANELS = (
    ("c1", "itl_p50_ms", "1 stream: inter-token latency, ms", "less is better"),
    ("c1", "ttft_p50_ms", "1 stream: time to first token, ms", "less is better"),
    ("c32", "output_tokens_per_s", "32 streams: output tokens/s", "more is better"),
    ("c32", "ttft_p50_ms", "32 streams: time to first token, ms", "less is better"),
    ("batch", "output_tokens_per_s", "batch of 32: output tokens/s", "more is better"),
    ("prefix", "ttft_later_p50_ms", "512 cached tokens: first token, ms", "less is better"),
)
OURS, THEIRS = "#2563eb", "#9ca3af"


def read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The lines of a run, by peer and part; the first of several, which is that of the comparison."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
    return {(line["peer"], line["part"]): line for line in reversed(lines) if line["bench"] == "compare"}


def draw(results: dict[tuple[str, str], dict[str, Any]], title: str, out: Path) -> None:
    """A panel of bars for each figure that the run has."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    peers = sorted({peer for peer, _ in results}, key=lambda peer: (peer != "aserve", peer))
    figure, axes = plt.subplots(2, 3, figsize=(12, 5.6), layout="constrained")
    for axis, (part, name, label, direction) in zip(axes.flat, PANELS, strict=True):
        values = {peer: results[peer, part][name] for peer in peers if name in results.get((peer, part), {})}
        bars = axis.barh(list(values), list(values.values()), color=[OURS if p == "aserve" else THEIRS for p in values])
        axis.bar_label(bars, fmt="%.4g", padding=3, fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.18)
        axis.set_title(f"{label} ({direction})", fontsize=9, loc="left")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    results = read(args.results)
    first = next(iter(results.values()))
    machine = first["machine"]
    title = f"{Path(first['model']).name} in {first['dtype']}, {machine['cores']} cores of an {machine['cpu']}"
    draw(results, f"{title}, client included", args.out)


if __name__ == "__main__":
    main()

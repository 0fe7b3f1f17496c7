"""`aserve simulate RECORDING`: the figures as recorded, as simulated, and as simulated with changes, side by side."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from aserve.cli.flags import ENGINE_FLAGS
from aserve.cli.settings import Parsed
from aserve.cli.tool_flags import ReportOptions, SimulateOptions
from aserve.cli.words import read_bool, read_count, read_number
from aserve.core.errors import ConfigError
from aserve.recording.files import Recording
from aserve.simulation.changes import SPEED, changed, check_name
from aserve.simulation.meter import Figures
from aserve.simulation.simulator import Simulator
from aserve.simulation.traffic import read_traffic

READERS: Final = {flag.name: flag.read for flag in ENGINE_FLAGS} | {
    "itl_factor": read_number,
    "max_in_flight": read_count,
    "num_blocks": read_count,
    "num_host_blocks": read_count,
    "plans_behind_prompts": read_bool,
    SPEED: read_number,
}
ROWS: Final = (
    ("requests", "requests", 1, "{:.0f}"),
    ("refused", "refused", 1, "{:.0f}"),
    ("seconds", "seconds", 1, "{:.2f}"),
    ("steps", "steps", 1, "{:.0f}"),
    ("output tokens/s", "output_tokens_per_s", 1, "{:.1f}"),
    ("all tokens/s", "total_tokens_per_s", 1, "{:.1f}"),
    ("first token p50, ms", "ttft_p50_s", 1e3, "{:.1f}"),
    ("first token p99, ms", "ttft_p99_s", 1e3, "{:.1f}"),
    ("between two p50, ms", "itl_p50_s", 1e3, "{:.2f}"),
    ("between two p99, ms", "itl_p99_s", 1e3, "{:.2f}"),
    ("whole p50, ms", "latency_p50_s", 1e3, "{:.0f}"),
    ("whole p99, ms", "latency_p99_s", 1e3, "{:.0f}"),
    ("preemptions", "preemptions", 1, "{:.0f}"),
    ("prefix hits, %", "hit_rate", 1e2, "{:.1f}"),
)
"""Of the table: what, which figure, by how much it is multiplied, and how it is written."""
COLUMN: Final = 14


def run(parsed: Parsed, _environ: Mapping[str, str]) -> int:
    """Simulate and tell."""
    if parsed.argument is None:
        raise ConfigError("aserve simulate needs a recording: aserve simulate FILE")
    changes = read_changes(parsed.of(SimulateOptions).set)
    recording = Recording(parsed.argument)
    after = changed(recording.header.config, changes)
    traffic = read_traffic(recording)
    columns = {"recorded": traffic.figures, "simulated": Simulator(traffic, recording.header.config).run()}
    if changes:
        columns["with changes"] = Simulator(traffic, after, speed=changes.get(SPEED, 1.0)).run()
    if parsed.of(ReportOptions).json:
        print(msgspec.json.encode({"model": recording.header.model, "changes": changes} | columns).decode())
    else:
        print("\n".join(_table(columns)))
    return 0


def read_changes(words: Sequence[str]) -> dict[str, Any]:
    """What is to be changed, by name. Raises `ConfigError` for a name that is none, and for a value of another kind."""
    changes: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("-", "_")
        if not equals:
            raise ConfigError(f"--set: NAME=VALUE is expected, got {word!r}")
        try:
            check_name(name)
            changes[name] = READERS[name](value)
        except ConfigError as error:
            raise ConfigError(f"--set {word}: {error.message}") from None
    return changes


def _table(columns: Mapping[str, Figures]) -> list[str]:
    lines = [" " * 20 + "".join(f"{name:>{COLUMN}}" for name in columns)]
    for label, name, factor, form in ROWS:
        cells = (form.format(getattr(figures, name) * factor) for figures in columns.values())
        lines.append(f"{label:20}" + "".join(f"{cell:>{COLUMN}}" for cell in cells))
    return lines

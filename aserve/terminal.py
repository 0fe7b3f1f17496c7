"""What a person sees in a terminal while a model loads, and then: a line to try."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, TextIO

from tqdm import tqdm

from aserve.core.pooling import Pooling, PoolingTask
from aserve.engine_parts import Progress

_INPUT: Final = '{"input": "What is aserve?"}'
UNIX: Final = "unix:"
"""How the URL of a server begins that listens on a path."""
_EXAMPLES: Final[Mapping[PoolingTask | None, tuple[str, str]]] = {
    None: ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "What is aserve?"}], "stream": true}'),
    "embed": ("/v1/embeddings", _INPUT),
    "classify": ("/classify", _INPUT),
    "reward": ("/pooling", _INPUT),
}
"""A path and a body for what a server can be asked, by what its model pools for."""


class StartupPrinter:
    """Prints each stage of loading once, as a line; one with parts (the bytes of weights) as a progress bar."""

    def __init__(self, file: TextIO = sys.stderr) -> None:
        self._file = file
        self._stage = ""
        self._bar: tqdm[Any] | None = None

    def report(self, progress: Progress) -> None:
        """Show where loading is."""
        if progress.stage != self._stage:
            self.close()
            self._stage = progress.stage
            if progress.total:
                self._bar = tqdm(
                    total=progress.total,
                    desc=progress.stage,
                    file=self._file,
                    unit=progress.unit or "part",
                    unit_scale=progress.unit == "B",
                    unit_divisor=1024,
                    mininterval=0.1 if self._file.isatty() else 10.0,  # a log keeps every line of it
                )
            else:
                self._file.write(f"{progress.stage}\n")  # at once: another thread may be writing too
                self._file.flush()
        if self._bar is not None:
            self._bar.update(progress.done - self._bar.n)

    def close(self) -> None:
        """End the bar that is open, if one is."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class StartupLines:
    """Says each stage of loading once, where lines are for machines."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._stage = ""

    def report(self, progress: Progress) -> None:
        """Say a stage that is new."""
        if progress.stage != self._stage:
            self._stage = progress.stage
            self._say(progress.stage)

    def close(self) -> None:
        """Nothing is open."""


def try_lines(url: str, pooling: Pooling | None, *, needs_key: bool, has_page: bool) -> list[str]:
    """The ways to ask the server that stand beneath "Try:": a command, and the chat page, if there is one."""
    lines = [f"  {curl_line(url, pooling, needs_key=needs_key)}"]
    has_page = has_page and pooling is None and not url.startswith(UNIX)
    return [*lines, f"or chat in a browser at {url}/"] if has_page else lines


def curl_line(url: str, pooling: Pooling | None, *, needs_key: bool) -> str:
    """A command that shows the server streaming an answer; or, where its model pools, answering at once."""
    key = '-H "Authorization: Bearer $ASERVE_API_KEY" ' if needs_key else ""
    path, body = _EXAMPLES[None if pooling is None else pooling.task]
    if url.startswith(UNIX):
        url = f"--unix-socket {url.removeprefix(UNIX)} http://localhost"
    return f"curl -N {url}{path} {key}-H 'Content-Type: application/json' -d '{body}'"

"""What a person sees in a terminal: loading as it goes, and a conversation."""

import asyncio
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, TextIO

from tqdm import tqdm

from aserve import build
from aserve.core.config import Options
from aserve.core.errors import InvalidRequestError
from aserve.core.pooling import Pooling, PoolingTask
from aserve.engine import Engine, Progress

_INPUT: Final = '{"input": "What is aserve?"}'
_EXAMPLES: Final[Mapping[PoolingTask | None, tuple[str, str]]] = {
    None: ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "What is aserve?"}], "stream": true}'),
    "embed": ("/v1/embeddings", _INPUT),
    "classify": ("/classify", _INPUT),
    "reward": ("/pooling", _INPUT),
}
"""A path and a body for what a server can be asked, by what its model pools for."""
CHAT_HELP = "Type a message; Ctrl-C stops an answer, Ctrl-D or /exit ends, /clear starts over."


class StartupPrinter:
    """Prints each stage of loading once, as a line; a stage with parts (shards) as a progress bar."""

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
                self._bar = tqdm(total=progress.total, desc=progress.stage, file=self._file, leave=True)
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


def run_chat(options: Options) -> int:
    """A conversation on standard input and output; the exit status.

    The event loop runs only while the model loads or answers, so that Ctrl-C means one thing at a time: it stops an
    answer while one is being given, and ends the program at the prompt.
    """
    printer = StartupPrinter()
    engine = build.AsyncEngine.from_options(options, on_progress=printer.report)
    with suppress(KeyboardInterrupt), asyncio.Runner() as runner:
        runner.run(engine.__aenter__())
        printer.close()
        print(CHAT_HELP, file=sys.stderr)
        try:
            converse(runner, engine)
        finally:
            runner.run(engine.aclose())
    return 0


def converse(runner: asyncio.Runner, engine: Engine) -> None:
    """Read messages and answer them until there are no more. A message that cannot be answered is one line."""
    messages: list[dict[str, str]] = []
    while (line := _read_line()) is not None:
        if line == "/clear":
            messages = []
        elif line:
            messages.append({"role": "user", "content": line})
            pieces: list[str] = []
            try:
                runner.run(_answer(engine, messages, pieces))
            except InvalidRequestError as error:  # the conversation has outgrown the context, say
                print(f"aserve: {error.message}", file=sys.stderr)
                messages.pop()
                continue
            except KeyboardInterrupt:
                print()
            messages.append({"role": "assistant", "content": "".join(pieces)})


def _read_line() -> str | None:
    """The next message, "" where there is nothing to say, None at the end."""
    try:
        line = input("> ").strip()
    except EOFError:
        print()
        return None
    return None if line == "/exit" else line


async def _answer(engine: Engine, messages: list[dict[str, str]], pieces: list[str]) -> None:
    """Print an answer as it grows, and add it to `pieces`, which keeps what there is when it is stopped."""
    async for delta in engine.chat(messages):
        print(delta.text, end="", flush=True)
        pieces.append(delta.text)
    print()


def try_lines(url: str, pooling: Pooling | None, *, needs_key: bool, has_page: bool) -> list[str]:
    """The ways to ask the server that stand beneath "Try:": a command, and the chat page, if there is one."""
    lines = [f"  {curl_line(url, pooling, needs_key=needs_key)}"]
    return [*lines, f"or chat in a browser at {url}/"] if has_page and pooling is None else lines


def curl_line(url: str, pooling: Pooling | None, *, needs_key: bool) -> str:
    """A command that shows the server streaming an answer; or, where its model pools, answering at once."""
    key = '-H "Authorization: Bearer $ASERVE_API_KEY" ' if needs_key else ""
    path, body = _EXAMPLES[None if pooling is None else pooling.task]
    return f"curl -N {url}{path} {key}-H 'Content-Type: application/json' -d '{body}'"

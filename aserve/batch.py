"""`aserve batch`: the requests of a file, a line of JSON each, answered into another file, without a server.

    in.jsonl --> those that out.jsonl does not answer yet --> as many at once as run together --> out.jsonl, as they end

A run that was killed is taken up again by the same command: a line that was not written whole is written anew.
"""

import asyncio
import sys
from codecs import BOM_UTF8
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, TextIO

import msgspec
from tqdm import tqdm

from aserve.build import AsyncEngine
from aserve.core.config import Options
from aserve.core.errors import ConfigError, InvalidRequestError
from aserve.edges import heard
from aserve.engine import Engine
from aserve.http.batch.lines import LineFields, LineRunner, failed_line, line_handlers, line_of
from aserve.http.openai.responses.keeping import Kept
from aserve.http.sse import StreamLimits
from aserve.http.tasks import task_group
from aserve.stores.responses import MemoryStore
from aserve.terminal import StartupPrinter

RESULT: Final = b'{"id":"batch_req_'
"""How the results begin that are written here."""
MAX_ID_BYTES: Final = 256
"""Of what another server may write before it names the line."""


class _Named(msgspec.Struct):
    """A line, as far as its name."""

    custom_id: str


def run_batch(options: Options, input_file: str, output_file: str) -> int:
    """Answer them; the exit status is 1 where a line could not be answered. Raises `ConfigError` for the files."""
    lines = read_lines(input_file)
    check_output(Path(input_file), Path(output_file))
    printer = StartupPrinter()
    engine = AsyncEngine.from_options(options, on_progress=printer.report)

    async def run() -> int:
        async with engine:
            printer.close()
            return await answer_lines(engine, lines, Path(output_file))

    num_failed = asyncio.run(run())
    if num_failed:
        print(
            f"aserve: {num_failed} of {len(lines)} lines were answered by an error; see {output_file}", file=sys.stderr
        )
    return 1 if num_failed else 0


def read_lines(path: str) -> list[bytes]:
    """Those of a file that are not empty, without a byte order mark. Raises `ConfigError` for one that has none."""
    try:
        content = Path(path).read_bytes().removeprefix(BOM_UTF8)
        lines = [line for line in content.split(b"\n") if line.strip()]
    except OSError as error:
        raise ConfigError(f"--input-file: cannot read {path}: {error.strerror}") from None
    if not lines:
        raise ConfigError(f"--input-file: {path} has no lines")
    return lines


def check_output(input_file: Path, output_file: Path) -> None:
    """Raise `ConfigError` for an output that cannot be gone on with, before a model is loaded for it."""
    if not output_file.exists():
        if not output_file.absolute().parent.is_dir():
            raise ConfigError(f"--output-file: {output_file.absolute().parent} is no folder")
        return
    if not output_file.is_file():
        raise ConfigError(f"--output-file: {output_file} is no file, which a run could be taken up in")
    if output_file.samefile(input_file):
        raise ConfigError(f"--output-file: {output_file} is the input")
    try:
        with output_file.open("rb") as output:
            read_output(output)
    except OSError as error:
        raise ConfigError(f"--output-file: cannot read {output_file}: {error.strerror}") from None


async def answer_lines(engine: Engine, lines: list[bytes], output: Path, file: TextIO = sys.stderr) -> int:
    """Answer the lines that the output has no answer to; how many of all were answered by an error, then or before.

    file: where the progress bar is shown.
    """
    runner = LineRunner(engine, line_handlers(engine, StreamLimits(), Kept(MemoryStore())))
    try:
        opened = output.open("a+b")
    except OSError as error:
        raise ConfigError(f"--output-file: cannot write {output}: {error.strerror}") from None
    with opened as out:
        done = answered_ids(out)
        num_failed = sum(done.values())
        pending = _pending(lines, runner.urls, done.keys())
        with tqdm(total=len(lines), initial=len(done), unit="request", file=file) as bar:

            def write(content: bytes) -> None:
                out.write(content + b"\n")
                out.flush()
                bar.update()

            async def work() -> None:
                nonlocal num_failed
                for asked in pending:
                    if isinstance(asked, bytes):
                        num_failed += 1
                        write(asked)
                        continue
                    answered = await heard(runner.run(asked, ""))
                    assert answered is not None, "nothing stops it"
                    num_failed += answered.is_error
                    write(answered.content)

            async with task_group() as tasks:
                for _ in range(engine.config.max_num_seqs + 1):  # one waits, so that a row is never empty for long
                    tasks.create_task(work(), name="aserve: lines of a batch")
    return num_failed


def answered_ids(output: BinaryIO) -> dict[str, bool]:
    """Of the lines that an output has, and whether by an error; what was not written to its end is cut off.

    Raises `ConfigError`.
    """
    done, end = read_output(output)
    output.truncate(end)
    return done


def read_output(output: BinaryIO) -> tuple[dict[str, bool], int]:
    """Which lines an output answers, and whether by an error; and where the last whole one ends.

    Raises `ConfigError` where it holds anything but results, the last of which may be cut: it is somebody's file.
    """
    output.seek(0)
    done: dict[str, bool] = {}
    end = 0
    for number, line in enumerate(output, start=1):
        is_whole = line.endswith(b"\n")
        answered = _answered(line)
        if answered is None and (is_whole or not _begins_as_result(line)):
            raise ConfigError(
                f"--output-file: line {number} of {output.name} is no result of a batch; name another file"
            )
        if answered is None or not is_whole:
            break
        end += len(line)
        custom_id, is_error = answered
        done[custom_id] = is_error
    return done, end


def _answered(line: bytes) -> tuple[str, bool] | None:
    """Which line a result answers, and whether by an error; None for what is none."""
    try:
        told: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not told.keys() >= {"custom_id", "response", "error"}:
        return None
    response = told["response"]
    is_answer = isinstance(response, dict) and response.get("status_code") == 200
    return str(told["custom_id"]), not is_answer


def _custom_id(line: bytes) -> str | None:
    """What a line of the input is called; None where it has no name, or is no line."""
    try:
        return msgspec.json.decode(line, type=_Named).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _begins_as_result(piece: bytes) -> bool:
    return piece.startswith(RESULT[: len(piece)]) or b'"custom_id"' in piece[:MAX_ID_BYTES]


def _pending(lines: list[bytes], urls: Sequence[str], done: Collection[str]) -> Iterator[LineFields | bytes]:
    """What is to be run, or an error to be written for a line that cannot be."""
    given = {name for raw in lines if (name := _custom_id(raw)) is not None}
    seen: set[str] = set()
    for number, raw in enumerate(lines, start=1):
        try:
            line = line_of(raw, urls)
            if line.custom_id in seen:
                raise InvalidRequestError(f"custom_id: {line.custom_id!r} is there twice", "custom_id")
        except InvalidRequestError as error:
            name = f"line-{number}"
            while name in given:  # or that line would count as answered, too
                name = f"_{name}"
            if name not in done:
                yield failed_line(name, error, error.code)
            continue
        seen.add(line.custom_id)
        if line.custom_id not in done:
            yield line

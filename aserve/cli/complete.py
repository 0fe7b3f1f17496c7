"""`aserve complete`: a prompt in, what follows it out, for pipes and scripts."""

import asyncio
import sys
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import msgspec

from aserve.cli.asking.choosing import open_source, sampling_fields
from aserve.cli.asking.source import Asked, Ended, Source
from aserve.cli.settings import Parsed
from aserve.cli.tool_flags import CompleteOptions
from aserve.core.errors import ConfigError

STANDARD_INPUT: Final = "-"


def run(parsed: Parsed, environ: Mapping[str, str]) -> int:
    """Write the answer to standard output; the exit status is 0. Raises `AserveError` where there is none."""
    options = parsed.of(CompleteOptions)
    asked = question(options, read_prompt(parsed.argument, options.file), sampling_fields(parsed))

    async def ask() -> None:
        source = await open_source(parsed, environ)
        try:
            await write_answer(source, asked, options)
        finally:
            await source.aclose()

    asyncio.run(ask())
    return 0


def read_prompt(argument: str | None, file: str | None) -> str:
    """The prompt: the argument, the file's content, or what standard input has. Raises `ConfigError`."""
    if argument not in (None, STANDARD_INPUT) and file is not None:
        raise ConfigError(f"the prompt is given twice: {argument!r} and --file {file}")
    if file is not None and file != STANDARD_INPUT:
        prompt = _text_of("--file", file)
    elif argument is not None and argument != STANDARD_INPUT:
        prompt = argument
    else:
        if sys.stdin.isatty():
            print("aserve: the prompt is read from the terminal; Ctrl-D ends it", file=sys.stderr)
        prompt = sys.stdin.read()
    if not prompt:
        raise ConfigError("the prompt is empty; aserve complete takes it as an argument, by --file or from a pipe")
    return prompt


def question(options: CompleteOptions, prompt: str, fields: Mapping[str, Any]) -> Asked:
    """What is asked for a prompt. Raises `ConfigError` for a schema that cannot be read."""
    if options.system is not None and not options.chat:
        raise ConfigError("--system is for a chat; add --chat")
    schema = None
    if options.json_schema is not None:
        try:
            schema = msgspec.json.decode(_text_of("--json-schema", options.json_schema), type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ConfigError(f"--json-schema: {options.json_schema} holds no JSON object: {error}") from None
    if not options.chat:
        return Asked(prompt=prompt, fields=fields, schema=schema)
    messages = [{"role": "user", "content": prompt}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    return Asked(messages=messages, fields=fields, schema=schema)


async def write_answer(source: Source, asked: Asked, options: CompleteOptions) -> None:
    """Write it as it comes, or at its end. On a terminal a line is ended; a pipe gets the answer and nothing else."""
    pieces = [asked.prompt] if options.echo and asked.messages is None else []
    async with aclosing(source.ask(asked)) as answer:
        async for piece in answer:
            if isinstance(piece, Ended):
                if piece.finish_reason == "length":
                    print("aserve: the answer was cut at its length; --max-tokens allows more", file=sys.stderr)
            elif not piece.is_thought:
                pieces.append(piece.text)
                if options.stream:
                    _write(pieces)
    _write(pieces)
    if sys.stdout.isatty():
        print()


def _write(pieces: list[str]) -> None:
    sys.stdout.write("".join(pieces))
    sys.stdout.flush()
    pieces.clear()


def _text_of(option: str, path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option}: {path} is not UTF-8: {error}") from None

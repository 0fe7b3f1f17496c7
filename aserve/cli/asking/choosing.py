"""Who is asked, and how: by what a command line says."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from aserve.cli.asking.source import Source
from aserve.cli.settings import Parsed
from aserve.cli.tool_flags import ClientOptions, SamplingOptions
from aserve.cli.words import LOOPBACK
from aserve.core.config import Options
from aserve.core.errors import InvalidRequestError
from aserve.core.params import SAMPLING_RULES, SamplingParams

if TYPE_CHECKING:
    from aserve.cli.asking.remote import Remote
    from aserve.engine import Engine


async def open_source(parsed: Parsed, environ: Mapping[str, str]) -> Source:
    """The server that --url names, or a model that is loaded now. Raises `AserveError`."""
    if parsed.of(ClientOptions).url is not None:
        return await open_remote(parsed, environ)
    from aserve.cli.asking.local import Local

    return Local(await load_engine(parsed.of(Options)))


async def open_remote(parsed: Parsed, environ: Mapping[str, str]) -> "Remote":
    """The server that --url names, and which of its models is asked. Raises `AskError`."""
    from aserve.cli.asking.remote import Remote

    client, model = parsed.of(ClientOptions), parsed.of(Options).model
    name = model if "model" in parsed.given or model != Options().model else ""
    key = client.api_key or environ.get("OPENAI_API_KEY") or None
    remote = Remote(client.url or LOOPBACK, api_key=key, name=name, timeout_s=client.timeout)
    if not name:
        try:
            names = await remote.choose()
        except BaseException:
            await remote.aclose()
            raise
        if len(names) > 1:
            print(f"aserve: {names[0]} is asked, of {len(names)} models; --model names another", file=sys.stderr)
    return remote


async def load_engine(options: Options) -> "Engine":
    """A model in this process, entered. How loading goes is shown where somebody watches. Raises `AserveError`."""
    from aserve.build import AsyncEngine
    from aserve.terminal import StartupPrinter

    printer = StartupPrinter()
    report = printer.report if sys.stderr.isatty() else None  # scripts have no use for it
    engine = AsyncEngine.from_options(options, on_progress=report)
    try:
        await engine.__aenter__()
    finally:
        printer.close()
    return engine


def sampling_fields(parsed: Parsed) -> dict[str, Any]:
    """Those that were given, by their names. Raises `InvalidRequestError` for one that is out of bounds."""
    given = msgspec.structs.asdict(parsed.of(SamplingOptions))
    fields = {name: value for name, value in given.items() if value not in (None, ())}
    if "seed" in parsed.given:
        fields["seed"] = parsed.of(Options).seed
    return checked(fields)


def checked(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as they are sent. Raises `InvalidRequestError` that names one."""
    unknown = [name for name in fields if name not in SAMPLING_RULES.fields]
    if unknown:
        raise InvalidRequestError(f"there is no parameter {unknown[0]}", unknown[0])
    params = SamplingParams(**fields)
    sent = {name: getattr(params, name) for name in fields}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in sent.items()}

"""The commands, each of which imports what it needs, for start-up counts: `serve` and `batch`; others have a room."""

import errno
import gc
import os
import sys
from collections.abc import MutableMapping, Sequence
from contextlib import closing
from importlib import import_module
from io import TextIOWrapper
from typing import TYPE_CHECKING, Final

import msgspec

from aserve import __version__
from aserve.cli.checks import check_address, check_early
from aserve.cli.command_table import COMMANDS
from aserve.cli.flags import BatchOptions, ServerOptions
from aserve.cli.settings import Parsed, parse_command
from aserve.cli.tracing import traced
from aserve.core.api_options import ApiOptions
from aserve.core.config import Options
from aserve.core.defaults import IN_MEMORY, default_max_num_queued_reqs
from aserve.core.errors import AserveError, ConfigError

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from aserve.engine import Engine
    from aserve.http import Keyring
    from aserve.http.replica import Replica
    from aserve.server import ServerConfig
    from aserve.stores.responses import ResponseStore

MAX_PREPARED_PRODUCTS: Final = 128
GARBAGE_THRESHOLD: Final = 10_000
"""How many more objects than were given back are made until Python looks for garbage. By default it is 700, which some
two hundred refusals come to before their log lines are written: looking then took 4 % of a flooded server's time."""

NOT_WRITTEN: Final = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What is nobody's mistake in the code: who reads has left, the disk is full, or a file as large as it may be."""


def bound_product_caches(environ: MutableMapping[str, str]) -> None:
    """Let torch and oneDNN keep what they prepared for fewer shapes of products, unless the environment says how many.

    They have some 0.6 MB for each number of rows of each weight's shape, and keep the 1,024 latest by default: a step
    has any number of tokens, so that a server would grow by a gigabyte over the hours. To prepare one takes 0.6 ms.
    """
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):  # read at the first product
        environ.setdefault(name, str(MAX_PREPARED_PRODUCTS))


def response_store(given: ServerOptions) -> "ResponseStore":
    """Where responses are kept. Raises `ConfigError`."""
    from aserve.stores.responses import FILE_BYTES, MEMORY_BYTES, MemoryStore, SqliteStore

    max_age_s = given.response_store_age
    if given.response_store is None:
        return MemoryStore(max_bytes=given.response_store_bytes or MEMORY_BYTES, max_age_s=max_age_s)
    return SqliteStore(given.response_store, max_bytes=given.response_store_bytes or FILE_BYTES, max_age_s=max_age_s)


def server_config(given: ServerOptions) -> "ServerConfig":
    """Where to listen, and how long to take over things."""
    from aserve.server import Limits, ServerConfig
    from aserve.server.sockets import tls_context

    return ServerConfig(
        host=given.host,
        port=given.port,
        uds=given.uds,
        tls=tls_context(given.ssl_certfile, given.ssl_keyfile),
        drain_delay_s=given.drain_delay,
        drain_timeout_s=given.shutdown_timeout,
        limits=Limits(
            head_timeout_s=given.client_header_timeout,
            keep_alive_s=given.keepalive_timeout,
            send_timeout_s=given.send_timeout,
        ),
    )


def application(
    engine: "Engine",
    given: ServerOptions,
    keyring: "Keyring",
    store: "ResponseStore",
    replica: "Replica | None" = None,
) -> "Starlette":
    """The APIs and pages of an engine, as the flags have them. replica: see `AppOptions`. Raises `ConfigError`."""
    from aserve.http import AppOptions, StreamLimits, create_app

    return create_app(
        engine,
        keyring=keyring,
        max_body_bytes=given.max_body_bytes,
        stream_limits=StreamLimits(send_timeout_s=given.send_timeout),
        response_store=store,
        options=AppOptions(**{name: getattr(given, name) for name in ApiOptions.__struct_fields__}, replica=replica),
    )


def with_bounded_queue(options: Options) -> Options:
    """A server's queue has an end; who embeds an engine knows how much he asks."""
    if options.max_num_queued_reqs is not None:
        return options
    return msgspec.structs.replace(options, max_num_queued_reqs=default_max_num_queued_reqs(options.max_num_seqs))


def end_loading() -> None:
    """Look for garbage from now on, seldom, and not in what was loaded: that takes 0.1 s. And prepare for streams."""
    from sse_starlette import EventSourceResponse

    EventSourceResponse(iter(()))  # the first has anyio import its backend, and all streams would wait for that
    gc.freeze()
    gc.set_threshold(GARBAGE_THRESHOLD)
    gc.enable()


def serve(options: Options, given: ServerOptions, *, notes: Sequence[str] = ()) -> int:
    """Serve the OpenAI API until a signal. The socket answers while the model loads. notes: lines to begin with."""
    gc.disable()  # until all is loaded: to look for garbage in it takes a tenth of the time
    import asyncio

    from aserve.build import AsyncEngine
    from aserve.http import Doorman, Keyring
    from aserve.server import logging_to, run
    from aserve.terminal import StartupLines, StartupPrinter, try_lines

    if given.log_format == "json":
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # a log for machines has no bars
    has_colours = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    with logging_to(sys.stderr, given.log_level, given.log_format, has_colours=has_colours) as say:
        for line in (f"aserve {__version__}", *notes):
            say(line)
        printer = StartupPrinter() if given.log_format == "text" else StartupLines(say)
        engine = AsyncEngine.from_options(with_bounded_queue(options), on_progress=printer.report)
        keyring = Keyring(given.api_key, path=given.api_keys_file, tenants=engine.tenants)
        store = response_store(given)
        app = application(engine, given, keyring, store)
        resuming: list[asyncio.Future[None]] = []

        def ready(url: str) -> None:
            end_loading()
            printer.close()
            if given.batch_store != IN_MEMORY:
                resuming.append(asyncio.ensure_future(app.state.batches.resume()))
            ways = try_lines(url, engine.info.pooling, needs_key=not keyring.is_open, has_page=given.ui)
            for line in (*engine.startup_lines(), "Ready. Try:", *ways):
                say(line)

        on_hangup = keyring.reload if given.api_keys_file else None
        doorman = Doorman(engine, keyring, given.max_body_bytes)
        settings = server_config(given)
        with closing(store), closing(app.state.batches), traced(app, engine, os.environ) as served:
            return run(engine, served, settings, on_ready=ready, on_hangup=on_hangup, say=say, doorman=doorman)


def batch(options: Options, files: BatchOptions) -> int:
    """Answer the requests of a file, in this process."""
    from aserve.batch import run_batch

    return run_batch(options, files.input_file, files.output_file)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0, 1 (it could not run), 2 (it was asked wrongly) or 130 (Ctrl-C)."""
    open_standard_streams()
    let_any_text_through()
    try:
        parsed = parse_command(sys.argv[1:] if argv is None else argv, os.environ)
    except ConfigError as error:
        print(f"aserve: {error.message}", file=sys.stderr)
        return 2
    bound_product_caches(os.environ)
    try:
        if Options in parsed.groups:
            try:
                check_early(parsed)
            except ConfigError as error:
                print(f"aserve: {error.message}", file=sys.stderr)
                return 2
            check_address(parsed)
        status = run_command(parsed)
        sys.stdout.flush()
        return status
    except AserveError as error:
        print(f"aserve: {error.message}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in NOT_WRITTEN:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter would try once more
        if error.errno != errno.EPIPE:  # else who read the output has enough of it
            print(f"aserve: what was to be written could not be: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def open_standard_streams() -> None:
    """Give what was started without some of its standard streams /dev/null for them.

    Else the next file or socket that is opened has their number: libuv aborts where one of its own is closed so.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the least number that is free, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (until the process ends)


def let_any_text_through() -> None:
    """Have what an encoding lacks written as an escape, as on standard error, and bytes that are no text be read.

    Whoever asks says what is wrong with the latter; either would else end an answer in its midst.
    """
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)


def run_command(parsed: Parsed) -> int:
    """Run what was understood; the exit status."""
    command = COMMANDS[parsed.command]
    if parsed.command == "serve" and not parsed.of(ServerOptions).dry_run:
        return serve(parsed.of(Options), parsed.of(ServerOptions), notes=parsed.notes)
    for note in parsed.notes:
        print(f"aserve: {note}", file=sys.stderr)
    if parsed.command == "batch":
        return batch(parsed.of(Options), parsed.of(BatchOptions))
    module = import_module(COMMANDS["doctor"].runs_in if parsed.command == "serve" else command.runs_in)
    status: int = module.run(parsed, os.environ)
    return status

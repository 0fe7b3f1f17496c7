"""The commands: `aserve serve`, `aserve batch` and `aserve chat`. Each imports what it needs, for start-up counts."""

import asyncio
import gc
import os
import sys
from collections.abc import MutableMapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Final

import msgspec

from aserve import __version__
from aserve.cli.flags import BatchOptions, ServerOptions
from aserve.cli.settings import parse_command
from aserve.cli.tracing import traced
from aserve.core.config import Options
from aserve.core.defaults import default_max_num_queued_reqs
from aserve.core.errors import AserveError, ConfigError
from aserve.stores.database import IN_MEMORY

if TYPE_CHECKING:
    from aserve.stores.responses import ResponseStore

MAX_PREPARED_PRODUCTS: Final = 128


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


def serve(options: Options, server_options: ServerOptions) -> int:
    """Serve the OpenAI API until a signal. The socket answers while the model loads."""
    gc.disable()  # until all is loaded, and stays: to look for garbage in it takes a tenth of the time
    from sse_starlette import EventSourceResponse  # each command imports what it needs: start-up counts

    from aserve.build import AsyncEngine
    from aserve.http import AppOptions, Doorman, Keyring, create_app
    from aserve.http.sse import StreamLimits
    from aserve.server import Limits, ServerConfig, logging_to, run
    from aserve.terminal import StartupLines, StartupPrinter, try_lines

    if options.max_num_queued_reqs is None:  # a server's queue has an end; who embeds an engine knows how much he asks
        bound = default_max_num_queued_reqs(options.max_num_seqs)
        options = msgspec.structs.replace(options, max_num_queued_reqs=bound)
    given = server_options
    timeouts = Limits(
        head_timeout_s=given.client_header_timeout,
        keep_alive_s=given.keepalive_timeout,
        send_timeout_s=given.send_timeout,
    )
    config = ServerConfig(
        host=given.host,
        port=given.port,
        drain_delay_s=given.drain_delay,
        drain_timeout_s=given.shutdown_timeout,
        limits=timeouts,
    )
    with logging_to(sys.stderr, given.log_level, given.log_format) as say:
        say(f"aserve {__version__}")
        printer = StartupPrinter() if given.log_format == "text" else StartupLines(say)
        engine = AsyncEngine.from_options(options, on_progress=printer.report)
        limits = StreamLimits(send_timeout_s=given.send_timeout)
        keyring = Keyring(given.api_key, path=given.api_keys_file, tenants=engine.tenants)
        store = response_store(given)
        app = create_app(
            engine,
            keyring=keyring,
            max_body_bytes=given.max_body_bytes,
            stream_limits=limits,
            response_store=store,
            options=AppOptions(**{name: getattr(given, name) for name in AppOptions.__dataclass_fields__}),
        )

        resuming: list[asyncio.Future[None]] = []

        def ready(url: str) -> None:
            EventSourceResponse(iter(()))  # the first has anyio import its backend, and all streams would wait for that
            gc.freeze()  # else the collector goes through all that was loaded again and again, 0.1 s a time
            gc.enable()
            printer.close()
            if given.batch_store != IN_MEMORY:
                resuming.append(asyncio.ensure_future(app.state.batches.resume()))
            ways = try_lines(url, engine.info.pooling, needs_key=not keyring.is_open, has_page=given.ui)
            for line in (*engine.startup_lines(), "Ready. Try:", *ways):
                say(line)

        on_hangup = keyring.reload if given.api_keys_file else None
        doorman = Doorman(engine, keyring, given.max_body_bytes)
        with closing(store), closing(app.state.batches.store), traced(app, engine, os.environ) as served:
            return run(engine, served, config, on_ready=ready, on_hangup=on_hangup, say=say, doorman=doorman)


def batch(options: Options, files: BatchOptions) -> int:
    """Answer the requests of a file, in this process."""
    from aserve.batch import run_batch

    return run_batch(options, files.input_file, files.output_file)


def chat(options: Options) -> int:
    """Talk to a model in the terminal, in this process."""
    from aserve.terminal import run_chat

    return run_chat(options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0, 1 (it could not run) or 2 (it was asked wrongly)."""
    try:
        command, options, others = parse_command(sys.argv[1:] if argv is None else argv, os.environ)
    except ConfigError as error:
        print(f"aserve: {error.message}", file=sys.stderr)
        return 2
    bound_product_caches(os.environ)
    try:
        if isinstance(others, BatchOptions):
            return batch(options, others)
        return chat(options) if command == "chat" else serve(options, others)
    except AserveError as error:
        print(f"aserve: {error.message}", file=sys.stderr)
        return 1

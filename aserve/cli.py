"""The command line: the only place that reads flags, a configuration file and the environment.

A value is taken from the first that has it: the command line, ASERVE_<NAME>, the file that --config names, the default.
Every flag is one row of FLAGS; the names are vLLM's where it has the same thing.
"""

import argparse
import difflib
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn

import msgspec

from aserve import __version__
from aserve.core.config import (
    DEVICES,
    DTYPES,
    GENERATION_CONFIGS,
    LOAD_FORMATS,
    PREEMPTION_MODES,
    SCHEDULING_POLICIES,
    Options,
)
from aserve.core.errors import AserveError, ConfigError

ENV_PREFIX: Final = "ASERVE_"
TRUE_WORDS: Final = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}
SUFFIXES: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What concerns the server and not the engine."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    shutdown_timeout: float = 30.0


class Flag(msgspec.Struct, frozen=True):
    """One option: its field's name, how a word is read, what stands for the word in the help, and what it does.

    many: takes several words.
    """

    name: str
    read: Callable[[str], Any]
    metavar: str
    help: str
    many: bool = False

    @property
    def option(self) -> str:
        """As it is typed."""
        return "--" + self.name.replace("_", "-")


def read_bool(word: str) -> bool:
    """true or false, in the usual spellings."""
    if word.lower() not in TRUE_WORDS:
        raise ConfigError(f"true or false is expected, got {word!r}")
    return TRUE_WORDS[word.lower()]


def read_count(word: str) -> int:
    """A whole number; k, M, G are powers of 1000 and Ki, Mi, Gi (perhaps with a B) powers of 1024."""
    digits = word.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    suffix = word[len(digits) :].lower().removesuffix("b")
    try:
        value = float(digits) * SUFFIXES[suffix] if suffix else int(digits)
    except (ValueError, KeyError):
        raise ConfigError(f"a whole number is expected, perhaps with k, M, G, Ki, Mi or Gi, got {word!r}") from None
    if value != int(value):
        raise ConfigError(f"a whole number is expected, got {word!r}")
    return int(value)


def read_number(word: str) -> float:
    """A decimal number."""
    try:
        return float(word)
    except ValueError:
        raise ConfigError(f"a number is expected, got {word!r}") from None


def _choice(allowed: Sequence[str]) -> Callable[[str], str]:
    def read(word: str) -> str:
        if word not in allowed:
            raise ConfigError(f"one of {', '.join(allowed)} is expected, got {word!r}")
        return word

    return read


ENGINE_FLAGS: Final = (
    Flag("model", str, "FOLDER|ID", "a folder or a Hugging Face id; demo is the bundled demonstration model"),
    Flag("tokenizer", str, "FOLDER|ID", "a folder or id whose tokenizer replaces the model's own"),
    Flag("chat_template", str, "FILE", "a Jinja file that replaces the model's own chat template"),
    Flag("revision", str, "NAME", "branch, tag or commit of a Hugging Face id"),
    Flag("download_dir", str, "FOLDER", "where Hugging Face files are cached"),
    Flag("served_model_name", str, "NAME", "names that requests may give; the first is put into answers", many=True),
    Flag("trust_remote_code", read_bool, "", "run Python code that comes with the model"),
    Flag(
        "load_format",
        _choice(LOAD_FORMATS),
        "|".join(LOAD_FORMATS),
        "dummy makes random weights from config.json alone",
    ),
    Flag("dtype", _choice(DTYPES), "|".join(DTYPES), "auto is the checkpoint's own"),
    Flag("device", _choice(DEVICES), "|".join(DEVICES), "auto is cuda where there is one"),
    Flag(
        "generation_config",
        _choice(GENERATION_CONFIGS),
        "|".join(GENERATION_CONFIGS),
        "whether generation_config.json sets sampling defaults",
    ),
    Flag("seed", int, "N", "of the dummy weights"),
    Flag("max_model_len", read_count, "N", "longest prompt and answer together, in tokens"),
    Flag("block_size", read_count, "N", "tokens in a block of the KV cache"),
    Flag("gpu_memory_utilization", read_number, "X", "share of the GPU's memory that aserve may use"),
    Flag("kv_cache_memory_bytes", read_count, "N", "size of the KV cache, instead of what profiling finds"),
    Flag("swap_space", read_number, "X", "GiB of host memory for the blocks of preempted sequences"),
    Flag("max_num_seqs", read_count, "N", "sequences that run at once"),
    Flag("max_num_batched_tokens", read_count, "N", "tokens that a step computes at most"),
    Flag("watermark", read_number, "X", "share of the blocks kept free when a new sequence is admitted"),
    Flag("enable_prefix_caching", read_bool, "", "reuse the blocks of equal prompt beginnings"),
    Flag("enforce_eager", read_bool, "", "capture no CUDA graphs: launch every step kernel by kernel"),
    Flag("batch_invariant", read_bool, "", "on CUDA too, the same bits for a request in any batch, more slowly"),
    Flag(
        "preemption_mode",
        _choice(PREEMPTION_MODES),
        "|".join(PREEMPTION_MODES),
        "how sequences give way when blocks run out; auto takes what is estimated to cost less",
    ),
    Flag(
        "scheduling_policy",
        _choice(SCHEDULING_POLICIES),
        "|".join(SCHEDULING_POLICIES),
        "who runs first: the earlier, or the lower priority number, which waiting makes up for",
    ),
    Flag("long_prefill_token_threshold", read_count, "N", "tokens of one prompt that a step computes; 0 is no limit"),
    Flag(
        "scheduler_delay_factor",
        read_number,
        "X",
        "newcomers wait X times as long as the last step with prompts took, so that more come together",
    ),
    Flag("max_num_queued_reqs", read_count, "N", "requests that may wait; one more is refused with status 429"),
)
SERVER_FLAGS: Final = (
    Flag("host", str, "ADDRESS", "address to listen on"),
    Flag("port", read_count, "N", "port to listen on; 0 picks a free one"),
    Flag("api_key", str, "KEY", "keys that requests must carry; none means open", many=True),
    Flag("shutdown_timeout", read_number, "SECONDS", "how long open requests get after the first SIGTERM"),
)
FLAGS: Final = {flag.name: flag for flag in (*ENGINE_FLAGS, *SERVER_FLAGS)}
DEFAULTS: Final = {
    field.name: field.default for options in (Options, ServerOptions) for field in msgspec.structs.fields(options)
}


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose complaint is one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; values stay words until `_settle` reads them."""
    parser = _Parser(
        prog="aserve",
        description="Serve large language models from one Python process.",
        epilog="aserve serve --help lists every option.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"aserve {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="{serve,chat}", parser_class=_Parser)
    add = partial(
        commands.add_parser,
        description=f"An option may also stand in --config FILE or, as {ENV_PREFIX}<NAME>, in the environment.",
        formatter_class=partial(argparse.HelpFormatter, max_help_position=32),
        allow_abbrev=False,
    )
    serve = add("serve", help="serve the OpenAI API (the default command)", usage="aserve serve [MODEL] [options]")
    _add_flags(serve, {"engine": ENGINE_FLAGS, "server": SERVER_FLAGS})
    chat = add("chat", help="talk to a model in the terminal", usage="aserve chat [MODEL] [options]")
    _add_flags(chat, {"engine": ENGINE_FLAGS})
    return parser


def _add_flags(parser: argparse.ArgumentParser, groups: Mapping[str, Sequence[Flag]]) -> None:
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--config", metavar="FILE", help="a YAML file of the options below")
    for title, flags in groups.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            _add_flag(group, flag)


def _add_flag(group: argparse._ArgumentGroup, flag: Flag) -> None:
    default = DEFAULTS[flag.name]
    shown = ("on" if default else "off") if isinstance(default, bool) else default
    help_line = flag.help if default in (None, ()) else f"{flag.help} (default: {shown})"
    if flag.read is read_bool:
        group.add_argument(
            flag.option, dest=flag.name, help=help_line, action=argparse.BooleanOptionalAction, default=None
        )
    else:
        group.add_argument(
            flag.option, dest=flag.name, help=help_line, metavar=flag.metavar, nargs="+" if flag.many else None
        )


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[str, Options, ServerOptions]:
    """The command, and everything that was wished. Raises `ConfigError` with one line that names the flag."""
    words = list(argv)
    if not words or (words[0] not in ("serve", "chat") and words[0] not in ("-h", "--help", "--version")):
        words.insert(0, "serve")
    namespace, unknown = build_parser().parse_known_args(words)
    if unknown:
        raise ConfigError(_unknown(unknown[0], [flag.option for flag in FLAGS.values()]))
    given = {name: value for name, value in vars(namespace).items() if name in FLAGS and value is not None}
    if namespace.model_argument is not None:
        if "model" in given:
            raise ConfigError(f"the model is given twice: {namespace.model_argument} and --model {given['model']}")
        given["model"] = namespace.model_argument
    from_environment = {
        name: environ[ENV_PREFIX + name.upper()] for name in FLAGS if ENV_PREFIX + name.upper() in environ
    }
    settled = {
        **_settle(_read_file(namespace.config), "--config"),
        **_settle(from_environment, "environment"),
        **_settle(given, "flag"),
    }
    engine = {flag.name: settled[flag.name] for flag in ENGINE_FLAGS if flag.name in settled}
    server = {flag.name: settled[flag.name] for flag in SERVER_FLAGS if flag.name in settled}
    return namespace.command, Options(**engine), _server_options(server)


def _server_options(given: dict[str, Any]) -> ServerOptions:
    options = ServerOptions(**given)
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port must be in [0, 65535], got {options.port}")
    if not 0 <= options.shutdown_timeout <= 86400:
        raise ConfigError(f"--shutdown-timeout must be in [0, 86400] seconds, got {options.shutdown_timeout}")
    return options


def _settle(given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Read every value by its flag: words of the command line or the environment, or values of a file."""
    settled = {}
    for name, value in given.items():
        flag = FLAGS[name]
        values = value if isinstance(value, list) else value.split(",") if flag.many else [value]
        try:
            read = [_read_value(flag, one) for one in values]
        except ConfigError as error:
            raise ConfigError(f"{flag.option} ({source}): {error.message}") from None
        settled[name] = tuple(read) if flag.many else read[0]
    return settled


def _read_value(flag: Flag, value: object) -> Any:
    word = str(value).lower() if isinstance(value, bool) else str(value)
    try:
        return flag.read(word)
    except ValueError:
        raise ConfigError(f"a whole number is expected, got {word!r}") from None


def _read_file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file) or {}
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config: {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config: {path} must be a mapping of options, got {type(content).__name__}")
    options = {str(name).replace("-", "_"): value for name, value in content.items()}
    for name in options:
        if name not in FLAGS:
            raise ConfigError(f"--config: {_unknown(name, list(FLAGS))}")
    return options


def _unknown(name: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name.split("=")[0], known, n=1)
    return f"unknown option {name}" + (f"; did you mean {nearest[0]}?" if nearest else "")


def serve(options: Options, server_options: ServerOptions) -> int:
    """Serve the OpenAI API until a signal. The socket answers while the model loads."""
    gc.disable()  # until all is loaded, and stays: to look for garbage in it takes a tenth of the time
    from sse_starlette import EventSourceResponse  # each command imports what it needs: start-up counts

    from aserve.build import AsyncEngine
    from aserve.http import create_app
    from aserve.server import run
    from aserve.terminal import StartupPrinter

    printer = StartupPrinter()
    engine = AsyncEngine.from_options(options, on_progress=printer.report)

    def ready(url: str) -> None:
        EventSourceResponse(iter(()))  # the first has anyio import its backend, and all streams would wait for that
        gc.freeze()  # else the collector goes through all that was loaded again and again, 0.1 s a time
        gc.enable()
        printer.close()
        print("\n".join(engine.startup_lines()), file=sys.stderr)
        print(f"Ready. Try:\n  {curl_line(url, server_options.api_key)}", file=sys.stderr, flush=True)

    return run(
        engine,
        create_app(engine, api_keys=server_options.api_key),
        host=server_options.host,
        port=server_options.port,
        drain_timeout_s=server_options.shutdown_timeout,
        on_ready=ready,
    )


def chat(options: Options) -> int:
    """Talk to a model in the terminal, in this process."""
    from aserve.terminal import run_chat

    return run_chat(options)


def curl_line(url: str, api_keys: Sequence[str]) -> str:
    """A command that shows the server streaming an answer."""
    key = '-H "Authorization: Bearer $ASERVE_API_KEY" ' if api_keys else ""
    body = '{"messages": [{"role": "user", "content": "What is aserve?"}], "stream": true}'
    return f"curl -N {url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{body}'"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0, 1 (it could not run) or 2 (it was asked wrongly)."""
    try:
        command, options, server_options = parse(sys.argv[1:] if argv is None else argv, os.environ)
    except ConfigError as error:
        print(f"aserve: {error.message}", file=sys.stderr)
        return 2
    try:
        return chat(options) if command == "chat" else serve(options, server_options)
    except AserveError as error:
        print(f"aserve: {error.message}", file=sys.stderr)
        return 1

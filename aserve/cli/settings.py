"""Settings: what the command line, the environment and a configuration file say, read in this one place.

A value is taken from the first that has it: the command line, ASERVE_<NAME>, the file that --config names, the default.
"""

import argparse
import difflib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn

from aserve import __version__
from aserve.cli.flags import DEFAULTS, ENGINE_FLAGS, FLAGS, SERVER_FLAGS, Flag, ServerOptions
from aserve.cli.words import read_bool, read_object, read_texts
from aserve.core.config import Options
from aserve.core.errors import ConfigError

ENV_PREFIX: Final = "ASERVE_"


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
    return options


def _settle(given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Read every value by its flag: words of the command line or the environment, or values of a file."""
    settled = {}
    for name, value in given.items():
        flag = FLAGS[name]
        try:
            read = [_read_value(flag, one) for one in _values(flag, value)]
        except ConfigError as error:
            raise ConfigError(f"{flag.option} ({source}): {error.message}") from None
        settled[name] = tuple(read) if flag.many else read[0]
    return settled


def _values(flag: Flag, value: Any) -> list[Any]:
    """Those of a flag that takes many; a JSON list of them may be one word, as vLLM's flags have it."""
    if not flag.many:
        return [value]
    [word] = value if isinstance(value, list) and len(value) == 1 else [value]
    if isinstance(word, str) and word.startswith('["'):
        return read_texts(word)
    return value if isinstance(value, list) else str(value).split(",")


def _read_value(flag: Flag, value: object) -> Any:
    if flag.read is read_object and isinstance(value, dict):
        return value
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

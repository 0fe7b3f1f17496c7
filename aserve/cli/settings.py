"""Settings: what the command line, the environment and a configuration file say, read in this one place.

A value is taken from the first that has it: the command line, ASERVE_<NAME>, the file that --config names, the default.
Commands share environment and file: what is another command's is no mistake there, and a name of none is.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from aserve.cli.command_table import ALL_NAMES, COMMANDS, Command
from aserve.cli.flags import BATCH_FLAGS, BatchOptions, Flag, ServerOptions
from aserve.cli.foreign_flags import sort_out
from aserve.cli.parser import build_parser
from aserve.cli.words import read_object, read_texts
from aserve.core.config import Options
from aserve.core.errors import ConfigError
from aserve.ray.options import RayOptions

ENV_PREFIX: Final = "ASERVE_"
KUBERNETES: Final = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$")
"""Ends of the variables that Kubernetes sets in every container for a service that is called aserve, say."""
KUBERNETES_LINK: Final = re.compile(r"^(tcp|udp|sctp)://")
"""What it sets <SERVICE>_PORT to."""

T = TypeVar("T", bound=msgspec.Struct)


class Parsed(NamedTuple):
    """A command line, understood.

    groups: the options of the command, by their types. given: what stood on the command line itself, by name.
    argument: the word without dashes. notes: lines about flags that are left out.
    """

    command: str
    groups: Mapping[type[msgspec.Struct], msgspec.Struct]
    given: frozenset[str]
    argument: str | None = None
    notes: tuple[str, ...] = ()

    def of(self, kind: type[T]) -> T:
        """The options of this type."""
        found = self.groups[kind]
        assert isinstance(found, kind), "they are kept by their types"
        return found


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[str, Options, ServerOptions]:
    """What `parse_command` says of a command that serves."""
    parsed = parse_command(argv, environ)
    return parsed.command, parsed.of(Options), parsed.of(ServerOptions)


def parse_command(argv: Sequence[str], environ: Mapping[str, str]) -> Parsed:
    """The command, and everything that was wished. Raises `ConfigError` with a line that names the flag."""
    words = _with_command(list(argv))
    command = COMMANDS.get(words[0])
    notes: tuple[str, ...] = ()
    if command is not None:
        words, notes = _ours(words, command)
    namespace, unknown = build_parser(words[0]).parse_known_args(words)
    command = COMMANDS[namespace.command]
    if unknown:
        raise ConfigError(_misplaced(unknown[0], command))
    flags = command.flags
    given = {name: value for name, value in vars(namespace).items() if name in flags and value is not None}
    argument = getattr(namespace, "argument", None)
    if argument is not None and command.argument == "MODEL":
        if "model" in given:
            raise ConfigError(f"the model is given twice: {argument} and --model {given['model']}")
        given["model"] = argument
    settled = {
        **_settle(_read_file(getattr(namespace, "config", None), flags), "--config", flags),
        **_settle(_from_environment(environ, flags), "environment", flags),
        **_settle(given, "flag", flags),
    }
    groups = _grouped(command, settled)
    return Parsed(command.name, groups, frozenset(given), argument, notes)


def parse_mapping(command_name: str, content: Mapping[str, Any], source: str) -> Parsed:
    """What a mapping says, as a file of --config would. source: what errors call it. Raises `ConfigError`."""
    command = COMMANDS[command_name]
    settled = _settle(_named_flags(content, source, command.flags), source, command.flags)
    return Parsed(command_name, _grouped(command, settled), frozenset(settled))


def _grouped(command: Command, settled: Mapping[str, Any]) -> dict[type[msgspec.Struct], msgspec.Struct]:
    groups = {group.options: group.options(**_of(settled, group.flags)) for group in command.groups}
    _check(groups)
    return groups


def _of(settled: Mapping[str, Any], flags: Iterable[Flag]) -> dict[str, Any]:
    return {flag.name: settled[flag.name] for flag in flags if flag.name in settled}


def _check(groups: Mapping[type[msgspec.Struct], msgspec.Struct]) -> None:
    """Refuse what no flag can tell by itself."""
    server = groups.get(ServerOptions)
    if isinstance(server, ServerOptions) and not 0 <= server.port <= 65535:
        raise ConfigError(f"--port must be in [0, 65535], got {server.port}")
    replicas = groups.get(RayOptions)
    if isinstance(replicas, RayOptions):
        replicas.check()
    files = groups.get(BatchOptions)
    for flag in BATCH_FLAGS if files is not None else ():
        if not getattr(files, flag.name):
            raise ConfigError(f"aserve batch needs {flag.option}")


def _with_command(words: list[str]) -> list[str]:
    """With a command in front: `serve`, where there are options alone, or a word that can only be a model."""
    first = words[0] if words else "--help"
    if first in ("-h", "--help", "--version") or first in COMMANDS:
        return words or [first]
    if first.startswith("-") or _looks_like_model(first):
        return ["serve", *words]
    nearest = difflib.get_close_matches(first, COMMANDS, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"the commands are {', '.join(COMMANDS)}"
    raise ConfigError(f"unknown command {first}; {hint} (a model is served by: aserve serve {first})")


def _looks_like_model(word: str) -> bool:
    return word == "demo" or "/" in word or word.startswith((".", "~")) or Path(word).is_dir()


def _ours(words: list[str], command: Command) -> tuple[list[str], tuple[str, ...]]:
    """Options as aserve spells them, and lines about vLLM's that make no difference; raises for those that do."""
    spelled = [_spelled(word) for word in words]
    if Options not in {group.options for group in command.groups}:
        return spelled, ()
    sorted_out = sort_out(spelled, [flag.option for flag in command.flags.values()])
    if sorted_out.refused:
        raise ConfigError("\naserve: ".join((*sorted_out.refused, *sorted_out.left_out)))
    return sorted_out.words, sorted_out.left_out


def _spelled(word: str) -> str:
    """An option that is typed with underscores, as vLLM takes them too."""
    option, equals, value = word.partition("=")
    name = option.removeprefix("--")
    if name == option or name.replace("-", "_").removeprefix("no_") not in ALL_NAMES:
        return word
    return "--" + name.replace("_", "-") + equals + value


def _misplaced(word: str, command: Command) -> str:
    """What is wrong with a word that the command does not take."""
    if not word.startswith("-"):
        return f"aserve {command.name} does not take the word {word!r}"
    option = word.split("=")[0]
    name = option.removeprefix("--").removeprefix("no-").replace("-", "_")
    takers = [other.name for other in COMMANDS.values() if name in other.flags and other is not command]
    if takers:
        return f"{option} is an option of aserve {', '.join(takers)}, and not of aserve {command.name}"
    return _unknown(option, [flag.option for flag in command.flags.values()])


def _from_environment(environ: Mapping[str, str], flags: Mapping[str, Flag]) -> dict[str, Any]:
    """What the environment says. Raises `ConfigError` for a variable of a name that no flag has."""
    found = {}
    known = {ENV_PREFIX + name.upper(): name for name in ALL_NAMES}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or KUBERNETES.search(variable):
            continue
        if variable.endswith("_PORT") and KUBERNETES_LINK.match(value):
            continue
        if variable not in known:
            nearest = difflib.get_close_matches(variable.removeprefix(ENV_PREFIX).lower(), ALL_NAMES, n=1)
            meant = f"did you mean {ENV_PREFIX}{nearest[0].upper()}?" if nearest else ""
            hint = meant or f"{ENV_PREFIX} and the name of a flag is read"
            raise ConfigError(f"environment: unknown variable {variable}; {hint}")
        if known[variable] in flags:
            found[known[variable]] = value
    return found


def _settle(given: Mapping[str, Any], source: str, flags: Mapping[str, Flag]) -> dict[str, Any]:
    """Read every value by its flag: words of the command line or the environment, or values of a file."""
    settled = {}
    for name, value in given.items():
        flag = flags[name]
        try:
            read = [_read_value(flag, one) for one in _values(flag, value)]
        except ConfigError as error:
            raise ConfigError(f"{flag.option} ({source}): {error.message}") from None
        settled[name] = tuple(read) if flag.many else read[0]
    return settled


def _values(flag: Flag, value: Any) -> list[Any]:
    """Those of a flag that takes many; a JSON list of them may be one word, as vLLM's flags have it."""
    if not flag.many:
        if isinstance(value, list):
            raise ConfigError(f"one value is expected, got a list of {len(value)}")
        return [value]
    [word] = value if isinstance(value, list) and len(value) == 1 else [value]
    if isinstance(word, str) and word.startswith('["'):
        return read_texts(word)
    return value if isinstance(value, list) else str(value).split(",")


def _read_value(flag: Flag, value: object) -> Any:
    if flag.read is read_object and isinstance(value, dict):
        return value
    if isinstance(value, dict | list) or value is None:
        kind = "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else "nothing"
        raise ConfigError(f"one value is expected, got {kind}")
    word = str(value).lower() if isinstance(value, bool) else str(value)
    try:
        return flag.read(word)
    except ValueError:
        raise ConfigError(f"a whole number is expected, got {word!r}") from None


def _read_file(path: str | None, flags: Mapping[str, Flag]) -> dict[str, Any]:
    """What a file says for these flags; null is as if it were not there. Raises `ConfigError` for unknown names."""
    if path is None:
        return {}
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file) or {}
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config: {path} must be a mapping of options, got {type(content).__name__}")
    return _named_flags(content, "--config", flags)


def _named_flags(content: Mapping[Any, Any], source: str, flags: Mapping[str, Flag]) -> dict[str, Any]:
    options = {str(name).replace("-", "_"): value for name, value in content.items()}
    for name in options:
        if name not in ALL_NAMES:
            raise ConfigError(f"{source}: {_unknown(name, ALL_NAMES)}")
    return {name: value for name, value in options.items() if name in flags and value is not None}


def _unknown(name: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"unknown option {name}" + (f"; did you mean {nearest[0]}?" if nearest else "")

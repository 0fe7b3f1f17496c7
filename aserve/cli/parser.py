"""The parser of the command line, made of the table of commands; values stay words, which settings.py reads."""

import argparse
from functools import partial
from typing import Final, NoReturn

from aserve import __version__
from aserve.cli.command_table import CHOICES, COMMANDS, Command, Group
from aserve.cli.flags import Flag
from aserve.cli.words import read_bool
from aserve.core.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose complaint is one line."""

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError`."""
        raise ConfigError(message)


def build_parser(name: str) -> argparse.ArgumentParser:
    """The parser of a command line that begins with this command, or with none. Raises `ConfigError` as it reads.

    Only that command's options are made, which takes milliseconds for each of them.
    """
    parser = Parser(
        prog="aserve",
        description="Serve large language models from one Python process, and talk to them.",
        epilog="Begin with: aserve serve demo. Options are listed by aserve serve --help, and so of each command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"aserve {__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", required=True, parser_class=Parser
    )
    for command in COMMANDS.values():
        added = commands.add_parser(
            command.name,
            help=command.help,
            usage=command.usage,
            description=f"{command.help[0].upper()}{command.help[1:]}.{_SHARED if command.groups else ''}",
            formatter_class=partial(argparse.HelpFormatter, max_help_position=32),
            allow_abbrev=False,
        )
        if command.name != name:
            continue
        _add_words(added, command)
        for group in command.groups:
            titled = added.add_argument_group(group.title)
            for flag in group.flags:
                _add_flag(titled, flag, group)
    return parser


_SHARED = " An option may also stand in --config FILE or, as ASERVE_<NAME>, in the environment."


_WORDS: Final = {
    "MODEL": "the same as --model",
    "PROMPT": "what is completed",
    "RECORDING": "a file that --record wrote",
}


def _add_words(parser: argparse.ArgumentParser, command: Command) -> None:
    if words := CHOICES.get(command.argument or ""):
        parser.add_argument("argument", metavar=command.argument, choices=words, help=f"one of {', '.join(words)}")
    elif command.argument is not None:
        parser.add_argument("argument", nargs="?", metavar=command.argument, help=_WORDS[command.argument])
    if command.groups:
        parser.add_argument("--config", metavar="FILE", help="a YAML file of the options below")


def _add_flag(group: argparse._ArgumentGroup, flag: Flag, of: Group) -> None:
    default = of.default(flag)
    shown = ("on" if default else "off") if isinstance(default, bool) else default
    if isinstance(default, tuple):
        shown = " ".join(map(str, default))
    help_line = flag.help if default in (None, ()) else f"{flag.help} (default: {shown})"
    help_line = help_line.replace("%", "%%")
    if flag.read is read_bool:
        group.add_argument(
            flag.option, dest=flag.name, help=help_line, action=argparse.BooleanOptionalAction, default=None
        )
    else:
        names = (flag.option,) if flag.short is None else (flag.short, flag.option)
        group.add_argument(
            *names, dest=flag.name, help=help_line, metavar=flag.metavar, nargs="+" if flag.many else None
        )

"""What begins with a slash in a chat: a table of commands, each of which does something to the conversation.

    /params temperature 0.2 --> the table --> `set_field` --> lines to show

Knows no terminal. A message that itself begins with a slash is typed with two.
"""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from aserve.cli.chat.conversation import Conversation
from aserve.cli.tool_flags import SamplingOptions
from aserve.core.errors import ConfigError, InvalidRequestError

PARAMETERS: Final = (*SamplingOptions.__struct_fields__, "seed", "thinking_token_budget")
"""What /params shows and sets."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a command comes to. lines: shown. ask: a question to be answered now. quits: the chat is over."""

    lines: tuple[str, ...] = ()
    ask: str | None = None
    quits: bool = False


class Talk(NamedTuple):
    """What commands work on. model: the name of whoever answers."""

    conversation: Conversation
    model: str


class SlashCommand(NamedTuple):
    """One of them. usage: what follows its name."""

    usage: str
    help: str
    run: Callable[[Talk, str], Outcome]


class CommandError(Exception):
    """A command that cannot be; the message is the line to show."""


def run_command(line: str, talk: Talk) -> Outcome:
    """Run a line that begins with a slash. Raises `CommandError`."""
    name, _, argument = line.removeprefix("/").partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        meant = f"did you mean /{nearest[0]}?" if nearest else "/help lists them"
        raise CommandError(f"unknown command /{name}; {meant} (a message that begins with / is typed with //)")
    if argument.strip() and not command.usage:
        raise CommandError(f"/{name} takes nothing after it, got {argument.strip()!r}")
    try:
        return command.run(talk, argument.strip())
    except (ConfigError, InvalidRequestError) as error:
        raise CommandError(error.message) from None


def _help(_talk: Talk, _argument: str) -> Outcome:
    typed = [(f"/{name} {command.usage}".rstrip(), command.help) for name, command in COMMANDS.items()]
    typed += [
        ('"""', "begins and ends a message of several lines; Alt-Enter begins a line in any message"),
        ("Ctrl-C", "stops an answer, and clears a line"),
        ("Ctrl-D", "ends the chat"),
    ]
    width = max(len(name) for name, _ in typed)
    return Outcome(lines=tuple(f"{name:{width}}  {told}" for name, told in typed))


def _system(talk: Talk, argument: str) -> Outcome:
    conversation = talk.conversation
    if not argument:
        return Outcome(lines=(f"system prompt: {conversation.system or 'none'}",))
    conversation.system = None if argument == "none" else argument
    return Outcome(lines=("system prompt: " + (conversation.system or "none"),))


def _params(talk: Talk, argument: str) -> Outcome:
    """Show them, or set them: `temperature 0.2`, or several as `temperature=0.2 top_p=0.9`."""
    words = argument.split()
    if len(words) == 2 and "=" not in words[0]:
        words = ["=".join(words)]
    elif words and words[0] == "stop":  # whose text may have spaces
        words = ["stop=" + argument.removeprefix("stop").strip()]
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("-", "_")
        if name not in PARAMETERS:
            nearest = difflib.get_close_matches(name, PARAMETERS, n=1)
            meant = f"did you mean {nearest[0]}?" if nearest else f"they are {', '.join(PARAMETERS)}"
            raise CommandError(f"there is no parameter {name}; {meant}")
        if not equals or not value:
            raise CommandError(f"{name} needs a value: /params {name} VALUE, or default")
        talk.conversation.set_field(name, value)
    width = max(map(len, PARAMETERS))
    fields = talk.conversation.fields
    return Outcome(lines=tuple(f"{name:{width}}  {fields.get(name, 'default')}" for name in PARAMETERS))


def _save(talk: Talk, argument: str) -> Outcome:
    path = _path(argument, "save")
    talk.conversation.save(path, talk.model)
    return Outcome(lines=(f"saved to {path}",))


def _load(talk: Talk, argument: str) -> Outcome:
    path = _path(argument, "load")
    talk.conversation.load(path)
    num_messages = len(talk.conversation.messages)
    return Outcome(lines=(f"loaded {num_messages} message{'s' if num_messages != 1 else ''} from {path}",))


def _path(argument: str, name: str) -> Path:
    if not argument:
        raise CommandError(f"/{name} needs a file: /{name} FILE")
    return Path(argument).expanduser()


def _retry(talk: Talk, _argument: str) -> Outcome:
    question = talk.conversation.take_back()
    if question is None:
        raise CommandError("there is no question to ask again")
    return Outcome(ask=question)


def _clear(talk: Talk, _argument: str) -> Outcome:
    talk.conversation.clear()
    return Outcome(lines=("forgotten; system prompt and parameters stay",))


def _quit(_talk: Talk, _argument: str) -> Outcome:
    return Outcome(quits=True)


COMMANDS: Final[dict[str, SlashCommand]] = {
    "help": SlashCommand("", "this list", _help),
    "system": SlashCommand("[TEXT|none]", "show or set the system prompt", _system),
    "params": SlashCommand("[NAME VALUE|default]", "show or set how answers are sampled", _params),
    "retry": SlashCommand("", "have the last question answered anew", _retry),
    "clear": SlashCommand("", "forget what was said", _clear),
    "save": SlashCommand("FILE", "write the conversation to a file", _save),
    "load": SlashCommand("FILE", "go on with one that was saved", _load),
    "quit": SlashCommand("", "end the chat; so does /exit", _quit),
    "exit": SlashCommand("", "end the chat", _quit),
}
"""By name, in the order of /help."""

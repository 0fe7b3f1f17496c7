"""Editor: the line in which messages are typed, with a history, several lines, and completion of commands."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from aserve.cli.chat.commands import COMMANDS, PARAMETERS
from aserve.cli.chat.plain import is_whole, without_fence

PROMPT: Final = "> "
MORE: Final = ". "
TAKES_FILE: Final = ("save", "load")


class Commands(Completer):
    """What may follow a slash: a command, then a file or a parameter."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """As prompt_toolkit asks for them."""
        line = document.text_before_cursor
        if not line.startswith("/") or "\n" in line:
            return
        name, space, rest = line.removeprefix("/").partition(" ")
        if not space:
            for command, told in COMMANDS.items():
                if command.startswith(name):
                    yield Completion(command, -len(name), display=f"/{command}", display_meta=told.help)
        elif name == "params":
            word = rest.rpartition(" ")[2]
            for parameter in PARAMETERS if rest == word else ():
                if parameter.startswith(word):
                    yield Completion(parameter, -len(word))
        elif name in TAKES_FILE:
            yield from self._paths.get_completions(Document(rest), complete_event)


class Editor:
    """Reads messages from a terminal. history: a file, made readable by its user alone; None keeps none."""

    def __init__(self, history: Path | None, **terminal: Any) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=_history(history),
            completer=Commands(),
            complete_while_typing=Condition(self._is_command),
            key_bindings=_keys(),
            multiline=True,
            prompt_continuation=MORE,
            enable_open_in_editor=True,
            **terminal,
        )

    def read(self) -> str | None:
        """As a `Reader`. Ctrl-C drops what was typed; Ctrl-D on an empty line is the end."""
        while True:
            try:
                return without_fence(self._session.prompt(FormattedText([("bold", PROMPT)])))
            except KeyboardInterrupt:
                continue
            except EOFError:
                return None

    def _is_command(self) -> bool:
        return self._session.default_buffer.text.startswith("/")


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        """Send the message, unless a command is being chosen, or its three quotes have not been closed."""
        buffer = event.current_buffer
        if buffer.complete_state is not None and buffer.complete_state.current_completion is not None:
            buffer.complete_state = None
        elif is_whole(buffer.text):
            buffer.validate_and_handle()
        else:
            buffer.insert_text("\n")

    @keys.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        """Alt-Enter."""
        event.current_buffer.insert_text("\n")

    return keys


def _history(path: Path | None) -> History:
    """Of a file that can be written, else of this chat alone."""
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)

"""`aserve chat`: somebody at a terminal, or lines through a pipe, and a model here or on a server."""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

from aserve.cli.asking.choosing import open_source, sampling_fields
from aserve.cli.asking.source import Source
from aserve.cli.chat.conversation import Conversation
from aserve.cli.chat.plain import PlainReader, PlainScreen
from aserve.cli.chat.session import Session
from aserve.cli.settings import Parsed
from aserve.cli.tool_flags import ChatOptions


def run(parsed: Parsed, environ: Mapping[str, str]) -> int:
    """A chat; the exit status is 1 where lines came through a pipe and one of them was not answered."""
    options = parsed.of(ChatOptions)
    conversation = Conversation(options.system, sampling_fields(parsed))
    if options.load is not None:
        conversation.load(Path(options.load).expanduser())
        conversation.system = options.system or conversation.system
        conversation.fields |= sampling_fields(parsed)
    with asyncio.Runner() as runner:
        source = runner.run(open_source(parsed, environ))
        try:
            if sys.stdin.isatty() and sys.stdout.isatty():
                return _on_terminal(runner, source, conversation, options, environ)
            return _through_pipe(runner, source, conversation)
        finally:
            runner.run(source.aclose())


def _on_terminal(
    runner: asyncio.Runner,
    source: Source,
    conversation: Conversation,
    options: ChatOptions,
    environ: Mapping[str, str],
) -> int:
    from rich.console import Console

    from aserve.cli.chat.editor import Editor
    from aserve.cli.chat.screen import RichScreen

    screen = RichScreen(Console(highlight=False), markdown=options.markdown, thoughts=options.thoughts)
    screen.tell((f"{source.name}: type a message. /help lists commands, Ctrl-C stops an answer, Ctrl-D ends.",))
    session = Session(source, conversation, screen, with_stats=options.stats)
    session.run(runner, Editor(history_file(options.history_file, environ)))
    return 0


def _through_pipe(runner: asyncio.Runner, source: Source, conversation: Conversation) -> int:
    is_typed = sys.stdin.isatty()
    screen = PlainScreen(sys.stdout, sys.stderr)
    session = Session(source, conversation, screen, is_interactive=is_typed)
    session.run(runner, PlainReader(sys.stdin, "> " if is_typed else ""))
    return 1 if session.num_failed and not is_typed else 0


def history_file(given: str | None, environ: Mapping[str, str]) -> Path | None:
    """Where typed lines are kept: as given, else in the user's state folder (XDG). None for "none"."""
    if given is not None:
        return None if given == "none" else Path(given).expanduser()
    state = environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "aserve" / "chat_history"

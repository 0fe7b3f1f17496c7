"""Session: lines that are typed, to answers that are shown.

The event loop runs only while a model is loaded or answers, so that Ctrl-C means one thing at a time: it stops an
answer while one is being given, and is the editor's at the prompt.
"""

import asyncio
from contextlib import aclosing
from typing import Final, Protocol

from aserve.cli.asking.source import Asked, Ended, Source
from aserve.cli.chat.commands import CommandError, Talk, run_command
from aserve.cli.chat.conversation import Conversation
from aserve.cli.chat.stats import Stopwatch
from aserve.core.errors import AserveError

CLOSING_S: Final = 0.01
"""For which the event loop runs after an answer was stopped, so that its connection is closed, and the server told."""


class Reader(Protocol):
    """Where lines come from."""

    def read(self) -> str | None:
        """The next message, which may have several lines; None at the end."""
        ...


class Screen(Protocol):
    """Where answers go to."""

    def thought(self, text: str) -> None:
        """Show more of what the model thinks."""
        ...

    def answer(self, text: str) -> None:
        """Show more of what it answers."""
        ...

    def end(self, stats: str | None) -> None:
        """The answer is over, or was stopped. stats: how fast it was; None where that is not asked for."""
        ...

    def tell(self, lines: tuple[str, ...]) -> None:
        """Show what a command has to say."""
        ...

    def complain(self, line: str) -> None:
        """Show what went wrong."""
        ...


class Session:
    """One chat. num_failed: answers that could not be had, or not to their end.

    is_interactive: somebody types, and Ctrl-C stops an answer; else it ends the chat.
    """

    def __init__(
        self,
        source: Source,
        conversation: Conversation,
        screen: Screen,
        *,
        with_stats: bool = False,
        is_interactive: bool = True,
    ) -> None:
        self._source = source
        self._screen = screen
        self._with_stats = with_stats
        self._is_interactive = is_interactive
        self.conversation = conversation
        self.num_failed = 0

    def run(self, runner: asyncio.Runner, reader: Reader) -> None:
        """Read and answer until there is no more to read, or a command ends it."""
        while (line := reader.read()) is not None:
            if line.strip() and not self.take(runner, line):
                return

    def take(self, runner: asyncio.Runner, line: str) -> bool:
        """Do what a line asks for; whether the chat goes on."""
        line = line.strip()
        question: str | None = line
        if line.startswith("//"):
            question = line[1:]
        elif line.startswith("/"):
            try:
                outcome = run_command(line, Talk(self.conversation, self._source.name))
            except CommandError as error:
                self._screen.complain(str(error))
                return True
            self._screen.tell(outcome.lines)
            if outcome.quits:
                return False
            question = outcome.ask
        if question is not None:
            self._answer(runner, question)
        return True

    def _answer(self, runner: asyncio.Runner, question: str) -> None:
        """Have a question answered. What came of an answer that is stopped, or breaks, stays in the conversation."""
        watch, pieces = Stopwatch(), list[str]()
        ended, problem = None, None
        try:
            ended = runner.run(self._show(question, watch, pieces))
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
            problem = "stopped"
            runner.run(asyncio.sleep(CLOSING_S))
        except AserveError as error:
            self.num_failed += 1
            problem = error.message
        self._screen.end(watch.line(ended) if self._with_stats and watch.has_begun else None)
        if problem is not None:
            self._screen.complain(problem)
        if pieces or ended is not None:
            self.conversation.answered(question, "".join(pieces))

    async def _show(self, question: str, watch: Stopwatch, pieces: list[str]) -> Ended | None:
        """Show an answer as it grows, and add it to `pieces`, which keeps what there is when it is stopped."""
        asked = Asked(messages=self.conversation.with_question(question), fields=self.conversation.fields)
        ended = None
        async with aclosing(self._source.ask(asked)) as answer:
            async for piece in answer:
                if isinstance(piece, Ended):
                    ended = piece
                    continue
                watch.tick()
                if piece.is_thought:
                    self._screen.thought(piece.text)
                else:
                    pieces.append(piece.text)
                    self._screen.answer(piece.text)
        return ended

"""RichScreen: answers on a terminal, as rendered Markdown that grows, and thoughts dimmed before them.

    text comes --> whole blocks (paragraphs, lists, code) are printed for good
               '-> the last block, which may go on, is shown below them and drawn anew, ten times a second at most

Control characters of an answer do not reach the terminal.
"""

import re
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Final

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

REDRAW_S: Final = 0.1
KEPT_LINES: Final = 2
"""Of the terminal, below the block that grows."""


class RichScreen:
    """As a `Screen`. markdown: whether answers are rendered. thoughts: whether they are shown."""

    def __init__(
        self,
        console: Console,
        *,
        markdown: bool = True,
        thoughts: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._renders = markdown
        self._shows_thoughts = thoughts
        self._clock = clock
        self._parser = MarkdownIt()
        self._live: Live | None = None
        self._drawn_s = 0.0
        self._block = ""  # the text of the one that grows
        self._has_blocks = False
        self._in_thought = False
        self._at_line_start = True

    def thought(self, text: str) -> None:
        """Dimmed, as it comes."""
        if self._shows_thoughts:
            self._in_thought = True
            self._write(text, "dim italic")

    def answer(self, text: str) -> None:
        """Rendered, or as it comes."""
        if self._in_thought:
            self._end_line()
            self._console.print()
            self._in_thought = False
        if not self._renders:
            self._write(text, "")
            return
        self._block += printable(text)
        self._print_whole_blocks()
        if self._clock() - self._drawn_s >= REDRAW_S:
            self._draw()

    def end(self, stats: str | None) -> None:
        """Print what is left, and how fast it came."""
        self._in_thought = False
        self._stop_drawing()
        for block in self._blocks():
            if block.strip():
                self._print_block(block)
        self._block, self._has_blocks = "", False
        self._end_line()
        if stats is not None:
            self._console.print(Text(stats, style="dim"))

    def tell(self, lines: tuple[str, ...]) -> None:
        """As they are."""
        for line in lines:
            self._console.print(Text(printable(line)))

    def complain(self, line: str) -> None:
        """In red, where there are colours."""
        self._console.print(Text(printable(line), style="red"))

    def _write(self, text: str, style: str) -> None:
        if text := printable(text):
            self._console.print(Text(text, style=style), end="", soft_wrap=True)
            self._at_line_start = text.endswith("\n")

    def _end_line(self) -> None:
        if not self._at_line_start:
            self._console.print()
            self._at_line_start = True

    def _print_whole_blocks(self) -> None:
        """Print the blocks before the last one, which nothing that comes can change."""
        *blocks, last = self._blocks()
        if blocks:
            self._stop_drawing()
            self._block = last
            for block in blocks:
                self._print_block(block)

    def _blocks(self) -> list[str]:
        """The text that is not printed yet, block by block."""
        starts = [token.map[0] for token in self._parser.parse(self._block) if token.level == 0 and token.map]
        lines = re.split(r"(?<=\n)", self._block)  # at what the parser takes for an end of a line, and nothing else
        bounds = [0, *sorted(set(starts) - {0}), len(lines)]
        return ["".join(lines[begin:end]) for begin, end in pairwise(bounds)]

    def _print_block(self, text: str) -> None:
        self._console.print(_Rendered(text, with_gap=self._has_blocks), end="")
        self._has_blocks = True

    def _draw(self) -> None:
        """Show the block that grows; only its end, where it is higher than the terminal."""
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop")
            self._live.start()
        at_most = max(1, self._console.height - KEPT_LINES)
        self._live.update(_Rendered(self._block, with_gap=self._has_blocks, at_most=at_most), refresh=True)
        self._drawn_s = self._clock()

    def _stop_drawing(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


class _Rendered:
    """Markdown without the empty lines that some blocks begin or end with.

    with_gap: an empty line comes first. at_most: of so many lines, the last.
    """

    def __init__(self, text: str, *, with_gap: bool, at_most: int | None = None) -> None:
        self._text = text
        self._with_gap = with_gap
        self._at_most = at_most

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(Markdown(self._text), options, pad=False)
        while lines and _is_blank(lines[0]):
            lines.pop(0)
        while lines and _is_blank(lines[-1]):
            lines.pop()
        if self._with_gap:
            lines.insert(0, [])
        for line in lines[-self._at_most :] if self._at_most is not None else lines:
            yield from line
            yield Segment.line()


def _is_blank(line: list[Segment]) -> bool:
    return not "".join(segment.text for segment in line).strip()


def printable(text: str) -> str:
    """Without the characters that would control the terminal."""
    return "".join(char for char in text if char in "\n\t" or not (ord(char) < 32 or 127 <= ord(char) < 160))

"""A chat without a terminal: a line of standard input is a message, and answers are plain text."""

import sys
from typing import Final, TextIO

FENCE: Final = '"""'


class PlainReader:
    """Reads messages from a stream. Between lines that begin and end with three quotes a message has several.

    prompt: shown before each, on `file`, where somebody types; "" shows nothing.
    """

    def __init__(self, stream: TextIO, prompt: str = "", file: TextIO = sys.stderr) -> None:
        self._stream = stream
        self._prompt = prompt
        self._file = file

    def read(self) -> str | None:
        """As a `Reader`."""
        if (line := self._line()) is None:
            return None
        if not line.startswith(FENCE):
            return line
        lines = [line.removeprefix(FENCE)]
        while not is_whole(FENCE + "\n".join(lines)):
            if (line := self._line()) is None:
                break
            lines.append(line)
        return without_fence(FENCE + "\n".join(lines))

    def _line(self) -> str | None:
        if self._prompt:
            self._file.write(self._prompt)
            self._file.flush()
        line = self._stream.readline()
        return line.rstrip("\r\n") if line else None


def is_whole(text: str) -> bool:
    """Whether a message that may have begun with three quotes has ended."""
    return not text.startswith(FENCE) or (text.rstrip().endswith(FENCE) and len(text.strip()) >= 2 * len(FENCE))


def without_fence(text: str) -> str:
    """A message without the quotes around it."""
    if not text.startswith(FENCE):
        return text
    return text.removeprefix(FENCE).rstrip().removesuffix(FENCE).strip("\n")


class PlainScreen:
    """Writes answers as they come, and nothing else; complaints go to standard error. Thoughts are left out."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._err = err
        self._ends_line = True

    def thought(self, text: str) -> None:
        """Nothing."""

    def answer(self, text: str) -> None:
        """At once."""
        self._out.write(text)
        self._out.flush()
        self._ends_line = text.endswith("\n")

    def end(self, stats: str | None) -> None:
        """End the line; statistics go to standard error."""
        if not self._ends_line:
            self._out.write("\n")
            self._out.flush()
            self._ends_line = True
        if stats is not None:
            self._err.write(f"{stats}\n")

    def tell(self, lines: tuple[str, ...]) -> None:
        """On standard error, since they are no answer."""
        for line in lines:
            self._err.write(f"{line}\n")

    def complain(self, line: str) -> None:
        """In one line."""
        self._err.write(f"aserve: {line}\n")

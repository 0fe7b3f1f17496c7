"""A command on a terminal of its own: what is typed, and what is shown."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, suppress

from tests.cli.program import ROOT, environment

TAKE_TERMINAL = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGHUP):  # ignored in the background of a shell
    signal.signal(number, signal.SIG_DFL)
os.login_tty(int(sys.argv[1]))
os.execv(sys.argv[2], sys.argv[2:])
"""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\x1b\][^\x07]*\x07|\r")
WIDTH, HEIGHT = 100, 30


class TerminalProgram:
    """A process with a terminal. shown: all that came, without what controls the terminal."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self.process = process
        self.raw = b""
        self._terminal: int | None = terminal
        self._seen = 0

    @property
    def shown(self) -> str:
        return ESCAPES.sub("", self.raw.decode(errors="replace"))

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def wait_for(self, wanted: str, within_s: float = 60.0) -> str:
        """Read until this is shown, after what was waited for last; all that was shown up to there since then."""
        deadline = time.monotonic() + within_s
        while wanted not in self.shown[self._seen :]:
            left = deadline - time.monotonic()
            assert left > 0, f"{wanted!r} is not shown after {self.shown[self._seen :]!r}"
            if select.select([self._terminal], [], [], left)[0]:
                try:
                    self.raw += os.read(self._terminal, 65536)
                except OSError:  # the program has ended
                    break
        shown = self.shown
        assert wanted in shown[self._seen :], f"{wanted!r} is not shown after {shown[self._seen :]!r}"
        end = shown.index(wanted, self._seen) + len(wanted)
        found, self._seen = shown[self._seen : end], end
        return found

    def hang_up(self) -> None:
        """Close the terminal. Idempotent."""
        if self._terminal is not None:
            os.close(self._terminal)
        self._terminal = None

    def wait_for_end(self) -> int:
        """Its exit status; what it still shows is read."""
        deadline = time.monotonic() + 60.0
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.shown
            if select.select([self._terminal], [], [], 0.1)[0]:
                with suppress(OSError):
                    self.raw += os.read(self._terminal, 65536)
        return self.process.returncode


def on_terminal(*words: str, **variables: str) -> AbstractContextManager[TerminalProgram]:
    """`aserve` with these words."""
    return python_on_terminal("-m", "aserve", *words, **variables)


@contextmanager
def python_on_terminal(*words: str, **variables: str) -> Generator[TerminalProgram]:
    """Python with these words."""
    terminal, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", TAKE_TERMINAL, str(side), sys.executable, *words],
        cwd=ROOT,
        env=environment(TERM="xterm", PROMPT_TOOLKIT_NO_CPR="1", COLUMNS=str(WIDTH), LINES=str(HEIGHT), **variables),
        pass_fds=[side],
    )
    os.close(side)
    program = TerminalProgram(process, terminal)
    try:
        yield program
    finally:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        program.hang_up()

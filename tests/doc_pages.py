"""The code of Markdown pages, and how it is run: block after block, as somebody who reads the page would.

A fenced block of `bash` or `python` is run in the page's own folder, which is empty at first. A comment before it says
otherwise:

    <!-- server -->            starts a server, which the blocks after it ask; until the next one or the end
                               Blocks before the first one ask the demo model, whose server make has started
    <!-- not run: REASON -->   is not run; tests/test_docs.py counts these
    <!-- an error: CODE -->    what is printed has to have this error in it
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
ADDRESS: Final = "127.0.0.1:8000"
"""Where pages say that the server is; in tests it has a port of its own."""
STAND_INS: Final = {"/path/to/checkpoint": str(ROOT / "aserve" / "demo")}
"""What a reader would put in the place of words."""
FENCE: Final = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN: Final = ("bash", "python")
TIMEOUT_S: Final = 120


@dataclass(frozen=True)
class Block:
    """Code of a page; line: of its fence. note: the comment before it."""

    page: str
    line: int
    language: str
    text: str
    note: str

    @property
    def is_server(self) -> bool:
        return self.note == "server"

    @property
    def not_run(self) -> str | None:
        """Why not."""
        word, _, reason = self.note.partition(": ")
        return reason if word == "not run" else None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """Those of a page that are `bash` or `python`, in their order."""
    text = (ROOT / page).read_text()
    return [
        Block(page, text[: match.start(2)].count("\n") + 1, match[2], match[3], match[1] or "")
        for match in FENCE.finditer(text)
        if match[2] in RUN
    ]


WARM: Final = """
import os, runpy, sys
import numpy, openai, torch, aserve.build, aserve.http, aserve.llm
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
folder, program, printed, complained = line.rstrip("\\n").split("\\t")
os.chdir(folder)
for number, path in ((0, os.devnull), (1, printed), (2, complained)):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
sys.argv = [program]
sys.path[0] = folder
runpy.run_path(program, run_name="__main__")
"""
"""A process that has imported what programs import, and is copied for each: they are spared some seconds."""


class Workshop:
    """What the pages share: programs by their names, a warm Python, and a server of the demo model."""

    def __init__(self, bin: Path) -> None:
        for name, words in (("aserve", "-m aserve"), ("python", ""), ("python3", "")):
            program = bin / name
            program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
            program.chmod(0o755)
        path = os.pathsep.join([str(bin), str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environ = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
        self._warm: subprocess.Popen[str] | None = None
        self._demo: Server | None = None

    def run_python(self, program: Path) -> subprocess.CompletedProcess[str]:
        """A program, in its folder."""
        if self._warm is None:
            self._warm = subprocess.Popen(
                [sys.executable, "-c", WARM],
                env=self.environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._warm.stdin is not None
        assert self._warm.stdout is not None
        outputs = [program.with_suffix(suffix) for suffix in (".out", ".err")]
        self._warm.stdin.write("\t".join(map(str, (program.parent, program, *outputs))) + "\n")
        self._warm.stdin.flush()
        code = int(self._warm.stdout.readline())
        return subprocess.CompletedProcess([str(program)], code, *(path.read_text() for path in outputs))

    def run_bash(self, program: Path) -> subprocess.CompletedProcess[str]:
        """A script, in its folder."""
        return subprocess.run(
            ["bash", "-euo", "pipefail", str(program)],
            cwd=program.parent,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def demo(self) -> "Server":
        """`aserve serve demo`, once for all."""
        if self._demo is None:
            self._demo = Server(["aserve", "serve", "demo"], ROOT, self.environ)
        return self._demo

    def close(self) -> None:
        """End both."""
        if self._warm is not None:
            self._warm.communicate()
        if self._demo is not None:
            self._demo.close()


class Server:
    """One that has been started, and is ready. address: host and port. lines: what it has said so far."""

    def __init__(self, words: list[str], folder: Path, environ: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [*words, "--port", "0"], cwd=folder, env=environ, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stderr is not None
        self.lines: list[str] = []
        for line in self._process.stderr:
            self.lines.append(line)
            if "listening on" in line:
                self.address = line.split()[-1].removeprefix("http://")
            if "curl -N" in line:
                break
        else:
            raise AssertionError(f"{shlex.join(words)} is no server:\n{''.join(self.lines)}")
        self._reader = threading.Thread(target=lambda: self.lines.extend(self._process.stderr or ()))
        self._reader.start()

    def close(self) -> None:
        """As Ctrl-C does; it has to end well."""
        self._process.send_signal(signal.SIGINT)
        code = self._process.wait(TIMEOUT_S)
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()
        assert code == 0, self.lines
        assert not any("Traceback" in line for line in self.lines), self.lines


class Reader:
    """Runs the blocks of a page in `folder`."""

    def __init__(self, folder: Path, workshop: Workshop) -> None:
        self._folder = folder
        self._workshop = workshop
        self._server: Server | None = None
        self._address = ADDRESS

    def run(self, block: Block) -> None:
        """It has to succeed, and to complain of nothing."""
        if ADDRESS in block.text and self._address == ADDRESS:
            self._address = self._workshop.demo().address
        text = block.text.replace(ADDRESS, self._address)
        for word, stand_in in STAND_INS.items():
            text = text.replace(word, stand_in)
        if block.is_server:
            self._start(shlex.split(text.replace("\\\n", " "), comments=True))
            return
        program = self._folder / f"block_{block.line}.{block.language}"
        program.write_text(text)
        done = (self._workshop.run_bash if block.language == "bash" else self._workshop.run_python)(program)
        assert done.returncode == 0, f"{block} ends with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, f"{block}:\n{done.stderr}"
        self._look_at(block, done.stdout)

    def _look_at(self, block: Block, printed: str) -> None:
        word, _, code = block.note.partition(": ")
        if word == "an error":
            assert f'"{code}"' in printed, f"{block} shows no {code}:\n{printed}"
        else:
            assert '{"error":' not in printed, f"{block}:\n{printed}"
        if '"stream": true' in block.text:
            assert "data: [DONE]" in printed, f"{block}:\n{printed}"

    def _start(self, words: list[str]) -> None:
        self.close()
        if words == ["aserve", "serve", "demo"]:
            self._address = self._workshop.demo().address
        else:
            self._server = Server(words, self._folder, self._workshop.environ)
            self._address = self._server.address

    def close(self) -> None:
        """End the server that is the page's own."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

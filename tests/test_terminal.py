"""The terminal: loading as a person sees it, and a conversation that can be stopped, cleared and left."""

import asyncio
import io
import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from aserve.core.config import Options
from aserve.core.pooling import Pooling
from aserve.engine import Engine, Progress
from aserve.terminal import StartupPrinter, converse, curl_line, run_chat
from tests.engines import says, scripted_loader

ROOT = Path(__file__).parent.parent


# Loading


def printed(*reports: Progress) -> str:
    file = io.StringIO()
    printer = StartupPrinter(file)
    for progress in reports:
        printer.report(progress)
    printer.close()
    printer.close()
    return file.getvalue()


def test_each_stage_is_a_line():
    stages = ("loading torch", "loading torch", "tokenizer")
    assert printed(*map(Progress, stages)) == "loading torch\ntokenizer\n"


def test_a_stage_with_parts_is_a_bar():
    text = printed(Progress("one"), Progress("weights", 0, 3), Progress("weights", 3, 3), Progress("memory"))
    assert text.startswith("one\n")
    assert "weights: 100%" in text
    assert "3/3" in text
    assert text.endswith("memory\n")


# A conversation, over a scripted engine


class Listener(Engine):
    """A scripted engine that keeps what it was told: each conversation as its messages' contents."""

    def __init__(self) -> None:
        super().__init__(scripted_loader(says("Yes.")))
        self.conversations: list[list[str]] = []

    async def encode_chat(self, messages, **options):
        prompt = await super().encode_chat(messages, **options)
        self.conversations.append([message["content"] for message in messages])
        return prompt


def talk(typed: str, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The conversations that come of what is typed."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    engine = Listener()
    with asyncio.Runner() as runner:
        runner.run(engine.__aenter__())
        converse(runner, engine)
        runner.run(engine.aclose())
    return engine.conversations


def test_a_conversation_goes_on_until_it_is_cleared(monkeypatch, capsys):
    conversations = talk("Is it?\n\n And now? \n/clear\nAgain?\n", monkeypatch)
    assert conversations == [["Is it?"], ["Is it?", "Yes.", "And now?"], ["Again?"]]
    shown = capsys.readouterr()
    assert shown.out == "> Yes.\n> > Yes.\n> > Yes.\n> \n"
    assert shown.err == ""


def test_exit_ends_it(monkeypatch, capsys):
    assert talk("/exit\nIs it?\n", monkeypatch) == []
    assert capsys.readouterr().out == "> "


def test_a_message_that_is_too_long_is_one_line_and_forgotten(monkeypatch, capsys):
    too_long = "long " * 30
    conversations = talk(f"{too_long}\nShort?\n", monkeypatch)
    assert conversations == [["Short?"]]  # the long one is refused before anything is asked
    shown = capsys.readouterr()
    assert shown.err.startswith("aserve: the prompt has 152 tokens")
    assert shown.err.count("\n") == 1


# The real command


@pytest.mark.torch
@pytest.mark.slow
def test_ctrl_c_at_the_prompt_ends_the_program_without_a_word(monkeypatch, capfd):
    class Interrupted(io.StringIO):
        def readline(self, size=-1):
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Interrupted())
    assert run_chat(Options(device="cpu", kv_cache_memory_bytes=2**23)) == 0
    shown = capfd.readouterr()
    assert shown.out == "> "
    assert shown.err.endswith("/clear starts over.\n")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "aserve", "chat", "--device", "cpu", "--kv-cache-memory-bytes", "8Mi", *arguments]


@pytest.mark.e2e
@pytest.mark.slow
def test_a_question_is_answered_from_a_pipe():
    done = subprocess.run(
        command(), input="Hello!\n/exit\n", cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    prompt, answer, rest = done.stdout[:2], done.stdout[2:-2], done.stdout[-2:]
    assert (prompt, rest) == ("> ", "> ")
    assert len(answer.strip()) > 10
    assert "weights: 100%" in done.stderr
    assert "Ctrl-C stops an answer" in done.stderr


@pytest.mark.e2e
@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on():
    """Random weights, so that the answer has no end of its own."""
    terminal, side = pty.openpty()
    take_terminal = "import os, sys; os.login_tty(int(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"
    chat = command("--load-format", "dummy", "--generation-config", "none")
    process = subprocess.Popen([sys.executable, "-c", take_terminal, str(side), *chat], cwd=ROOT, pass_fds=[side])
    os.close(side)
    try:
        read_until(terminal, b"> ")
        os.write(terminal, b"Hello!\n")
        read_until(terminal, b"Hello!\r\n")
        assert os.read(terminal, 1)  # the answer has begun
        os.write(terminal, b"\x03")
        read_until(terminal, b"\r\n> ")
        os.write(terminal, b"/clear\n")
        read_until(terminal, b"/clear\r\n> ")
        os.write(terminal, b"\x04")
        assert process.wait(timeout=20) == 0
    finally:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        os.close(terminal)


def read_until(terminal: int, wanted: bytes) -> None:
    """Read what the program shows, up to its showing `wanted`; pytest's timeout is the limit."""
    shown = b""
    while wanted not in shown:
        shown += os.read(terminal, 1024)


@pytest.mark.parametrize(
    ("task", "path"),
    [(None, "/v1/chat/completions"), ("embed", "/v1/embeddings"), ("classify", "/classify"), ("reward", "/pooling")],
)
def test_the_example_is_a_request_that_the_server_answers(task, path):
    """Caught: a server that pools proposed a chat, which it refuses."""
    pooling = None if task is None else Pooling(task=task, method="last", size=4, activation="none")
    line = curl_line("http://here:1", pooling, needs_key=True)
    assert line.startswith(f'curl -N http://here:1{path} -H "Authorization: Bearer $ASERVE_API_KEY" ')
    body = json.loads(line.rpartition(" -d ")[2].strip("'"))
    assert ("messages" if task is None else "input") in body

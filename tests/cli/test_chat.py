"""A chat without a terminal: what is remembered, what commands do, what is asked of whom, and lines through a pipe."""

import asyncio
import io
import json
import re
import stat
from pathlib import Path

import pytest
from rich.console import Console

from aserve.cli.asking.local import Local
from aserve.cli.asking.remote import AskError, Remote
from aserve.cli.asking.source import Asked, Ended
from aserve.cli.chat.commands import COMMANDS, CommandError, Talk, run_command
from aserve.cli.chat.conversation import Conversation
from aserve.cli.chat.plain import PlainReader, PlainScreen, is_whole, without_fence
from aserve.cli.chat.run import history_file
from aserve.cli.chat.screen import RichScreen
from aserve.cli.chat.session import Session
from aserve.cli.chat.stats import Stopwatch
from aserve.cli.settings import parse_command
from aserve.cli.tool_flags import ChatOptions
from aserve.core.errors import ConfigError
from aserve.engine import Engine
from tests.cli.fake_openai import MARKDOWN, fake_openai
from tests.cli.program import aserve, modules_after
from tests.engines import says, scripted_loader

# A session over a scripted engine


class Listener(Engine):
    """A scripted engine that keeps what it was told: each conversation as its messages' contents."""

    def __init__(self) -> None:
        super().__init__(scripted_loader(says("Yes.")))
        self.conversations: list[list[str]] = []

    async def encode_chat(self, messages, **options):
        prompt = await super().encode_chat(messages, **options)
        self.conversations.append([message["content"] for message in messages])
        return prompt


def talk(typed: str, system: str | None = None, **fields: object) -> tuple[list[list[str]], str, str, int]:
    """The conversations that come of what is typed, what is written, what is told, and how many failed."""
    out, err = io.StringIO(), io.StringIO()
    engine = Listener()
    with asyncio.Runner() as runner:
        runner.run(engine.__aenter__())
        session = Session(Local(engine), Conversation(system, fields), PlainScreen(out, err), is_interactive=False)
        session.run(runner, PlainReader(io.StringIO(typed)))
        runner.run(engine.aclose())
    return engine.conversations, out.getvalue(), err.getvalue(), session.num_failed


def test_a_conversation_goes_on_until_it_is_cleared():
    conversations, out, _, _ = talk("Is it?\n\nAnd now?\n/clear\nAgain?\n")
    assert conversations == [["Is it?"], ["Is it?", "Yes.", "And now?"], ["Again?"]]
    assert out == "Yes.\nYes.\nYes.\n"


@pytest.mark.parametrize("word", ["/exit", "/quit"])
def test_a_command_ends_it(word):
    assert talk(f"{word}\nIs it?\n") == ([], "", "", 0)


def test_a_message_that_is_too_long_is_one_line_and_forgotten():
    conversations, out, err, num_failed = talk("long " * 30 + "\nShort?\n")
    assert conversations == [["Short?"]]  # the long one is refused before anything is asked
    assert err.startswith("aserve: the prompt has 152 tokens")
    assert (out, err.count("\n"), num_failed) == ("Yes.\n", 1, 1)


def test_the_system_prompt_comes_first_and_a_question_can_be_asked_again():
    conversations, _, _, _ = talk("A?\nB?\n/retry\n", "Be brief.")
    assert conversations[1] == conversations[2] == ["Be brief.", "A?", "Yes.", "B?"]


def test_a_message_of_several_lines():
    assert talk('"""a\n/b\n"""\n')[0] == [["a\n/b"]]
    assert talk('"""a"""\n"""never closed\nb')[0] == [["a"], ["a", "Yes.", "never closed\nb"]]
    assert [is_whole(text) for text in ("a", '"""', '"""a', '"""a"""', '""""""')] == [True, False, False, True, True]
    assert without_fence('a """b"""') == 'a """b"""'


def test_parameters_reach_the_engine_and_wrong_ones_do_not():
    _, out, err, _ = talk("/params max_tokens 2\nA?\n/params temperature hot\n/params max_tokens=default\nA?\n")
    assert out == "Ye\nYes.\n"
    assert "aserve: temperature must be" in err


# Commands


def command(line: str, conversation: Conversation) -> tuple[str, ...]:
    return run_command(line, Talk(conversation, "model")).lines


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/hlep", "unknown command /hlep; did you mean /help? (a message that begins with / is typed with //)"),
        ("/zzz", "unknown command /zzz; /help lists them"),
        ("/quit now", "/quit takes nothing after it, got 'now'"),
        ("/save", "/save needs a file: /save FILE"),
        ("/load /none", "cannot read /none: No such file"),
        ("/save /none/x", "cannot write /none/x: No such file"),
        ("/retry", "there is no question to ask again"),
        ("/params temperature", "temperature needs a value: /params temperature VALUE, or default"),
        ("/params n 2", "there is no parameter n; "),
        ("/params seed 1.5", "seed must be"),
        ("/params top_p -1", "top_p must be in"),
    ],
)
def test_a_command_that_cannot_be_is_told_in_a_line(line, told):
    conversation = Conversation()
    with pytest.raises(CommandError) as refused:
        command(line, conversation)
    assert str(refused.value).startswith(told)
    assert conversation.fields == {}


def test_every_command_is_in_the_help():
    [*lines] = command("/help", Conversation())
    for name in COMMANDS:
        assert any(line.startswith(f"/{name} ") for line in lines)


def test_parameters_are_shown_and_set():
    conversation = Conversation(None, {"top_k": 5})
    assert "top_k                  5" in command("/params", conversation)
    command("/params temperature=0.5 top_p=0.9 seed=3", conversation)
    command("/params stop a b", conversation)
    command("/params top-k default", conversation)
    command("/params min_p default", conversation)
    assert conversation.fields == {"temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["a b"]}


def test_the_system_prompt_is_shown_set_and_taken_away():
    conversation = Conversation()
    assert command("/system", conversation) == ("system prompt: none",)
    command("/system Be brief. ", conversation)
    assert conversation.system == "Be brief."
    command("/system none", conversation)
    assert conversation.system is None


def test_a_conversation_is_saved_and_loaded(tmp_path):
    file = tmp_path / "chat.json"
    conversation = Conversation("Be brief.", {"temperature": 0.5, "stop": ["x"]})
    conversation.answered("A?", "Yès.\n")
    command(f"/save {file}", conversation)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]
    other = Conversation("Be long.", {"top_k": 1})
    assert command(f"/load {file}", other) == (f"loaded 2 messages from {file}",)
    assert (other.system, other.fields, other.messages) == (
        conversation.system,
        conversation.fields,
        conversation.messages,
    )


def test_a_list_of_messages_is_a_conversation_too(tmp_path):
    file = tmp_path / "chat.json"
    file.write_text('[{"role": "user", "content": "A?"}]')
    conversation = Conversation("Be brief.", {"top_k": 1})
    conversation.load(file)
    assert (conversation.system, conversation.fields) == (None, {"top_k": 1})
    assert conversation.with_question("B?")[0] == {"role": "user", "content": "A?"}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "is not JSON"),
        ("3", "holds no messages"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "holds no messages"),
        ('{"messages": [{"role": "user", "content": null}]}', "holds no messages"),
        ('{"messages": [], "sampling": {"temperature": 9}}', "sampling: temperature must be"),
        ('{"messages": [], "sampling": {"heat": 9}}', "sampling: there is no parameter heat"),
        ('{"messages": [], "sampling": 3}', "sampling: "),
        ("[" * 100000, "is not JSON"),
    ],
)
def test_a_file_that_is_no_conversation_changes_nothing(tmp_path, content, told):
    file = tmp_path / "chat.json"
    file.write_text(content)
    conversation = Conversation("Be brief.")
    conversation.answered("A?", "Yes.")
    with pytest.raises(ConfigError, match=told):
        conversation.load(file)
    assert conversation.with_question("B?")[0]["content"] == "Be brief."


def test_figures_are_of_the_clock_of_whoever_reads():
    clock = iter([10.0, 10.5, 11.0, 12.5]).__next__
    watch = Stopwatch(clock)
    assert watch.line(None) == "no tokens"
    for _ in range(3):
        watch.tick()
    assert watch.line(Ended(1, 9, "length")) == "9 tokens, 4.0 tokens/s, the first after 0.50 s, cut at its length"
    assert watch.line(None) == "about 3 tokens, 1.0 tokens/s, the first after 0.50 s"


def test_where_typed_lines_are_kept():
    assert history_file(None, {"XDG_STATE_HOME": "/s"}) == Path("/s/aserve/chat_history")
    assert history_file(None, {}) == Path.home() / ".local/state/aserve/chat_history"
    assert history_file("none", {}) is None
    assert history_file("/x/y", {}) == Path("/x/y")


def test_all_of_an_answer_is_shown_where_nothing_is_left_out():
    shown = parse_command(["chat"], {}).of(ChatOptions)
    assert (shown.markdown, shown.thoughts, shown.stats) == (True, True, True)
    bare = parse_command(["chat", "--no-markdown", "--no-thoughts", "--no-stats"], {}).of(ChatOptions)
    assert (bare.markdown, bare.thoughts, bare.stats) == (False, False, False)


# The real command, through a pipe


async def test_a_server_that_goes_before_its_answer_is_one_line():
    async with Remote("http://127.0.0.1:9", name="m") as remote:
        with pytest.raises(AskError, match=r"^http://127\.0\.0\.1:9/v1: cannot connect \("):
            await anext(remote.ask(Asked(prompt="A?")))


@pytest.mark.e2e
@pytest.mark.slow
def test_lines_through_a_pipe_are_answered_by_a_server():
    with fake_openai("fake-1", "fake-2", key="secret") as server:
        words = ("chat", "--url", server.url, "--system", "Be brief.", "--temperature", "0.5", "--seed", "7")
        done = aserve(*words, "--max-tokens", "9", stdin="A?\nthink\n/exit\nB?\n", ASERVE_API_KEY="secret,other")
    assert (done.code, done.out) == (0, "You said: A?\nYes.\n")
    assert done.err == "aserve: fake-1 is asked, of 2 models; --model names another\n"
    assert server.bodies[0] == {
        "model": "fake-1",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A?"}],
        "temperature": 0.5,
        "max_tokens": 9,
        "seed": 7,
    }


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "words", "told"),
    [
        ("", ("--api-key", "wrong"), "/v1/models: 401: no such key (--api-key gives a key)"),
        ("/nowhere", ("--api-key", "secret"), "/nowhere/models: 404: Not Found; a URL goes up to /v1"),
        ("/garbage", ("--api-key", "secret"), "/garbage/models: this is no list of models"),
    ],
)
def test_a_server_that_cannot_be_asked_is_one_line(path, words, told):
    with fake_openai(key="secret") as server:
        done = aserve("chat", "--url", server.url + path, *words, stdin="A?\n")
    assert done.code == 1
    assert done.err.startswith(f"aserve: {server.url}{told}")
    assert (done.out, done.err.count("\n")) == ("", 1)


@pytest.mark.e2e
@pytest.mark.slow
def test_what_fails_is_told_and_the_next_line_is_answered():
    with fake_openai("fake-1") as server:
        done = aserve(
            *("chat", "--url", server.url + "/v1/", "--model", "fake-1"),
            stdin="cut\nbusy\nbroken\ngarbage\nunstreamed\nescapes\n",
            OPENAI_API_KEY="x",
        )
    assert done.code == 1
    assert done.out == "This is cut here\nGood so far. \nAll at once.\na\x1b[2Jb\x9bc\u2028d\n"  # a pipe gets all
    assert [line.split(" (")[0] for line in done.err.splitlines()] == [
        "aserve: the stream ended before the answer did",
        "aserve: the server answers 429: too many requests",
        "aserve: the server answers 500: <html> [31mInternal Server Error</html>",
        "aserve: the server sends what is no answer",
    ]
    assert "/v1/models" not in server.paths


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("words", [("chat",), ("complete",), ("complete", "--chat")])
def test_who_asks_a_server_imports_neither_a_model_nor_a_terminal(words):
    with fake_openai("fake-1") as server:
        code, modules = modules_after(*words, "--url", server.url, stdin="A?\n")
    assert code == 0
    assert len(server.bodies) == 1
    assert not modules & {"torch", "transformers", "numpy", "tokenizers", "rich", "prompt_toolkit", "hypercorn"}


@pytest.mark.e2e
@pytest.mark.slow
def test_nobody_listens():
    done = aserve("chat", "--url", "http://127.0.0.1:9", stdin="A?\n")
    assert done.code == 1
    assert done.err.startswith("aserve: http://127.0.0.1:9/v1/models: cannot connect (")


@pytest.mark.e2e
@pytest.mark.slow
def test_a_question_is_answered_from_a_pipe_in_this_process(tmp_path):
    file = tmp_path / "chat.json"
    file.write_text(json.dumps([{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hello!"}]))
    words = ("chat", "demo", "--device", "cpu", "--kv-cache-memory-bytes", "8Mi", "--temperature", "0")
    done = aserve(*words, "--load", str(file), stdin=f"What is aserve?\n/save {file}\n")
    assert (done.code, done.out.count("\n")) == (0, 1)
    assert "aserve" in done.out
    assert done.err == f"saved to {file}\n"
    assert len(json.loads(file.read_text())["messages"]) == 4


# Markdown as it comes


def drawn(*pieces: str, redraws: bool = True) -> str:
    """What a terminal has shown at the end: the last that was printed for good."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=40, height=10, highlight=False, color_system=None)
    clock = iter(range(1000)) if redraws else iter([0.0] * 1000)
    screen = RichScreen(console, clock=lambda: float(next(clock)))
    for piece in pieces:
        screen.answer(piece)
    screen.end(None)
    return terminal_text(out.getvalue())


def terminal_text(raw: str) -> str:
    """The lines of a terminal without an end that was sent this: cursor up, erase line, and new lines."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|\n|\r)", raw):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part.startswith("\x1b["):
            row -= int(part[2:-1] or 1) if part.endswith("A") else 0
            lines[row] = "" if part.endswith("K") else lines[row]
        elif part != "\r":
            lines[row] += part
    return "\n".join(line.rstrip() for line in lines).rstrip()


def test_blocks_are_rendered_once_with_a_line_between_them():
    whole = drawn(MARKDOWN, redraws=False)
    assert [line.strip() for line in whole.splitlines()] == [
        *("Title", "", "Some bold text.", "", "• one", "• two", "", "print(1)", "", "The end.")
    ]


@pytest.mark.parametrize("text", [MARKDOWN, "a\u2028b\n\n\x85c\n\n- d\n", "\n\na", "1. x\n   - y\n\n\n> z\n"])
def test_any_pieces_end_as_the_whole(text):
    whole = drawn(text, redraws=False)
    for size in (1, 3, 7, 40):
        assert drawn(*(text[i : i + size] for i in range(0, len(text), size))) == whole


@pytest.mark.parametrize("markdown", [False, True])
def test_an_empty_line_is_between_the_thoughts_and_the_answer_and_nowhere_else(markdown):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=40, height=10, highlight=False, color_system=None)
    screen = RichScreen(console, markdown=markdown, clock=lambda: 0.0)
    for pieces in (("One", " and", " two."), ("Three.",)):
        screen.thought("Let me")
        screen.thought(" see.")
        for piece in pieces:
            screen.answer(piece)
        screen.end(None)
    screen.answer("Four.")
    screen.end(None)
    assert [line.strip() for line in terminal_text(out.getvalue()).splitlines()] == [
        *("Let me see.", "", "One and two."),
        *("Let me see.", "", "Three."),
        "Four.",
    ]


def test_a_block_that_is_higher_than_the_terminal_is_whole_at_the_end():
    lines = [f"- line {i}" for i in range(30)]
    shown = drawn(*(f"{line}\n" for line in lines))
    assert [line.strip() for line in shown.splitlines()] == [f"• line {i}" for i in range(30)]

"""`aserve chat` as somebody at a terminal has it: editing, history, several lines, commands, Ctrl-C."""

import json
import stat
import time

import pytest

from tests.cli.fake_openai import FakeOpenAI, fake_openai
from tests.cli.terminal_program import TerminalProgram, on_terminal
from tests.e2e.server_process import serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

READY = "Ctrl-D ends."
PROMPT = "\n>"  # without the space, which is drawn as a movement
ENTER, CTRL_C, CTRL_D, UP, ALT_ENTER, TAB = "\r", "\x03", "\x04", "\x1b[A", "\x1b\r", "\t"


@pytest.fixture(name="fake")
def make_fake():
    with fake_openai("fake-1") as server:
        yield server


@pytest.fixture(name="chat")
def make_chat(fake, tmp_path):
    with on_terminal("chat", "--url", fake.url, XDG_STATE_HOME=str(tmp_path)) as program:
        program.wait_for(READY)
        program.wait_for(PROMPT)
        yield program


def ask(chat: TerminalProgram, question: str) -> str:
    """What is shown of an answer, up to its figures."""
    chat.type(question + ENTER)
    shown = chat.wait_for(", the first after ")
    chat.wait_for(PROMPT)
    return shown


def wait_until_left(fake: FakeOpenAI) -> None:
    """Until the server was told that nobody reads an answer."""
    deadline = time.monotonic() + 10.0
    while "left" not in fake.paths:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def questions(fake: FakeOpenAI) -> list[list[str]]:
    return [[message["content"] for message in body["messages"]] for body in fake.bodies]


def test_an_answer_has_its_figures_and_the_conversation_goes_on(chat, fake):
    assert "You said: Hi" in ask(chat, "Hi")
    ask(chat, "And now?")
    assert questions(fake) == [["Hi"], ["Hi", "You said: Hi", "And now?"]]
    assert "3 tokens, " in chat.shown
    chat.type(CTRL_D)
    assert chat.wait_for_end() == 0


def test_lines_can_be_edited_and_come_again_in_this_chat_and_the_next(chat, fake, tmp_path):
    ask(chat, "Hallo\x1b[D\x1b[D\x1b[D\x1b[D\x7fH")  # to behind the H, and another in its place
    assert questions(fake)[-1] == ["Hallo"]
    chat.type(UP)
    chat.wait_for("Hallo")
    ask(chat, "!")
    assert questions(fake)[-1][-1] == "Hallo!"
    history = tmp_path / "aserve" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    with on_terminal("chat", "--url", fake.url, XDG_STATE_HOME=str(tmp_path)) as again:
        again.wait_for(READY)
        again.wait_for(PROMPT)
        again.type(UP + UP)
        ask(again, "?")
    assert questions(fake)[-1] == ["Hallo?"]


def test_a_message_may_have_several_lines(chat, fake):
    ask(chat, "one" + ALT_ENTER + "two")
    ask(chat, '"""a' + ENTER + "b" + ENTER + '"""')
    ask(chat, "\x1b[200~x\ny\x1b[201~")  # pasted
    assert [asked[-1] for asked in questions(fake)] == ["one\ntwo", "a\nb", "x\ny"]


def test_ctrl_c_stops_an_answer_and_not_the_program(chat, fake):
    chat.type("endless" + ENTER)
    chat.wait_for("word word word")
    chat.type(CTRL_C)
    chat.wait_for("stopped")
    chat.wait_for(PROMPT)
    wait_until_left(fake)
    assert "You said: Again" in ask(chat, "Again")
    [_, (question, partial, again)] = questions(fake)
    assert (question, again) == ("endless", "Again")
    assert partial.startswith("word word word")


def test_ctrl_c_at_the_prompt_drops_the_line(chat, fake):
    chat.type("never mind" + CTRL_C)
    chat.wait_for(PROMPT)
    ask(chat, "Hi")
    assert questions(fake) == [["Hi"]]


def test_commands(chat, fake, tmp_path):
    def command(line: str, wanted: str) -> None:
        chat.type(line + ENTER)
        chat.wait_for(wanted)
        chat.wait_for(PROMPT)

    command("/help", "ends the chat")
    command("/hlep", "unknown command /hlep; did you mean /help?")
    command("/system Be brief.", "system prompt: Be brief.")
    command("/params temperature 0.5", "thinking_token_budget")
    command("/params temprature 1", "there is no parameter temprature; did you mean temperature?")
    command("/params top_p 7", "top_p must be in")
    ask(chat, "Hi")
    ask(chat, "/retry")
    assert fake.bodies[0]["messages"] == fake.bodies[1]["messages"]
    assert fake.bodies[1]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert fake.bodies[1]["temperature"] == 0.5
    saved = tmp_path / "chat.json"
    command(f"/save {saved}", "saved to")
    command("/clear", "forgotten")
    ask(chat, "Anew")
    assert questions(fake)[-1] == ["Be brief.", "Anew"]
    command(f"/load {saved}", "loaded 2 messages")
    ask(chat, "//not a command")
    assert questions(fake)[-1] == ["Be brief.", "Hi", "You said: Hi", "/not a command"]
    assert json.loads(saved.read_text())["sampling"] == {"temperature": 0.5}
    chat.type("/quit" + ENTER)
    assert chat.wait_for_end() == 0


def test_commands_and_their_words_are_completed(chat):
    chat.type("/par")
    chat.wait_for("/params")  # in the menu
    chat.type(TAB)
    chat.wait_for("ams")
    chat.type(" temp")
    chat.wait_for("temperature")
    chat.type(TAB)
    chat.wait_for("erature")
    chat.type(" 0.25" + ENTER)
    chat.wait_for("temperature            0.25")
    chat.wait_for("thinking_token_budget")


def test_markdown_is_rendered_and_thoughts_are_dim(chat):
    shown = ask(chat, "markdown")
    assert "bold" in shown
    assert "**" not in shown
    assert " • one" in shown
    assert "```" not in shown
    assert shown.count("Some bold text.") >= 1
    ask(chat, "think")
    assert b"\x1b[2;3mlet me see" in chat.raw


def test_what_would_control_the_terminal_does_not_reach_it(chat):
    assert "a[2Jbc" in ask(chat, "escapes")
    assert b"\x1b[2Jb" not in chat.raw


@pytest.mark.parametrize(
    ("question", "told"),
    [
        ("cut", "the stream ended before the answer did"),
        ("busy", "the server answers 429: too many requests (try again after 7 s)"),
        ("broken", "the server answers 500: <html> [31mInternal Server Error</html>"),
        ("garbage", "the server sends what is no answer"),
        ("faulty", "the server ends the answer: a step failed"),
        ("page", "the server sends what is no answer"),
    ],
)
def test_a_server_that_fails_is_one_line_and_the_chat_goes_on(chat, question, told):
    chat.type(question + ENTER)
    chat.wait_for(told)
    chat.wait_for(PROMPT)
    assert "You said: Hi" in ask(chat, "Hi")


def test_no_colour_is_shown_where_none_is_wanted(fake, tmp_path):
    with on_terminal("chat", "--url", fake.url, XDG_STATE_HOME=str(tmp_path), NO_COLOR="1") as chat:
        chat.wait_for(PROMPT)
        chat.type("busy" + ENTER)
        chat.wait_for("429")
        assert b"\x1b[31m" not in chat.raw


def test_a_model_in_this_process(tmp_path):
    words = ("chat", "demo", "--device", "cpu", "--kv-cache-memory-bytes", "8Mi", "--temperature", "0")
    with on_terminal(*words, XDG_STATE_HOME=str(tmp_path)) as chat:
        chat.wait_for(READY)
        chat.wait_for(PROMPT)
        assert "aserve" in ask(chat, "What is aserve?")
        chat.type(CTRL_D)
        assert chat.wait_for_end() == 0


def test_an_answer_without_an_end_of_this_process_is_stopped(tmp_path):
    """Random weights, so that it has none."""
    words = ("chat", "demo", "--device", "cpu", "--kv-cache-memory-bytes", "8Mi", "--load-format", "dummy")
    with on_terminal(*words, "--no-markdown", XDG_STATE_HOME=str(tmp_path)) as chat:
        chat.wait_for(PROMPT)
        chat.type("Hello!" + ENTER)
        chat.wait_for("Hello!")
        chat.wait_for("\n")
        chat.wait_for("e")  # the answer has begun
        chat.type(CTRL_C)
        chat.wait_for("stopped")
        chat.wait_for(PROMPT)
        chat.type(CTRL_D)
        assert chat.wait_for_end() == 0


def test_a_server_of_aserve(tmp_path):
    with serving() as server:
        server.wait_until_ready()
        with on_terminal("chat", "--url", server.url, "--temperature", "0", XDG_STATE_HOME=str(tmp_path)) as chat:
            chat.wait_for("demo: type a message")
            chat.wait_for(PROMPT)
            assert "aserve" in ask(chat, "What is aserve?")
            server.popen.terminate()
            server.popen.wait()
            chat.type("Are you there?" + ENTER)
            chat.wait_for("cannot connect")
            chat.wait_for(PROMPT)

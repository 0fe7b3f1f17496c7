"""`aserve complete`: a prompt from wherever, its answer to standard output and nothing else."""

import json
import sys
from io import BytesIO, TextIOWrapper

import pytest

from aserve.cli.asking.source import Asked, AskError
from aserve.cli.commands import let_any_text_through
from aserve.cli.complete import read_prompt
from aserve.core.errors import ConfigError
from tests.cli.fake_openai import fake_openai
from tests.cli.program import aserve
from tests.e2e.server_process import serving

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
HERE = ("--device", "cpu", "--kv-cache-memory-bytes", "8Mi")


def test_a_prompt_is_an_argument_or_a_file(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("From a file.\n")
    assert read_prompt("Typed.", None) == "Typed."
    assert read_prompt(None, str(file)) == "From a file.\n"
    with pytest.raises(ConfigError, match=r"the prompt is given twice: 'Typed\.' and --file"):
        read_prompt("Typed.", str(file))
    with pytest.raises(ConfigError, match="--file: cannot read /none: No such file"):
        read_prompt(None, "/none")
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read_prompt(None, str(file))


@pytest.mark.parametrize("messages", [None, [{"role": "user", "content": "Hi\udcff"}]], ids=["prompt", "chat"])
def test_bytes_that_are_no_text_are_told_in_a_line(messages):
    """Catches what no server can be sent, and comes from a pipe that is not UTF-8."""
    with pytest.raises(AskError, match="the text is not UTF-8: character 2 is a byte that is no text"):
        Asked(prompt="Hi\udcff" if messages is None else "", messages=messages)


def test_any_text_comes_through_the_standard_streams(monkeypatch):
    """Catches an answer that ends in its midst where a locale lacks a character of it."""
    out = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(out, encoding="ascii"))
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"Hi\xff"), encoding="utf-8"))
    let_any_text_through()
    print("né", end="", flush=True)
    assert out.getvalue() == b"n\\xe9"
    assert read_prompt(None, None) == "Hi\udcff"


@pytest.mark.e2e
@pytest.mark.slow
def test_a_pipe_that_is_no_text_is_told_in_a_line():
    with fake_openai() as server:
        words = ("complete", "--url", server.url, "--model", "m")
        done = aserve(*words, "--echo", "é", PYTHONIOENCODING="ascii")
        assert (done.code, done.out) == (0, "\\xe9You said: \\xe9")
        done = aserve(*words, "H\udcff")
    assert (done.code, done.err) == (1, "aserve: the text is not UTF-8: character 1 is a byte that is no text\n")


@pytest.mark.e2e
@pytest.mark.slow
def test_what_a_server_is_asked(tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    with fake_openai() as server:
        words = ("complete", "--url", server.url, "--model", "m")
        assert aserve(*words, "Hi", "--max-tokens", "5", "--stop", "x", "y").out == "You said: Hi"
        assert aserve(*words, stdin="From a pipe").out == "You said: From a pipe"
        assert aserve(*words, "--chat", "--system", "Be brief.", "--json-schema", str(schema), "think").out == "Yes."
        assert aserve(*words, "-", "--echo", "--no-stream", stdin="Hi").out == "HiYou said: Hi"
    assert server.paths[0] == "/v1/completions"
    assert (server.bodies[0]["prompt"], server.bodies[0]["max_tokens"]) == ("Hi", 5)
    assert server.bodies[0]["stop"] == ["x", "y"]
    assert server.paths[2] == "/v1/chat/completions"
    assert server.bodies[2]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert server.bodies[2]["response_format"]["json_schema"]["schema"] == SCHEMA


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "stdin", "told"),
    [
        (("--system", "x", "Hi"), "", "--system is for a chat; add --chat"),
        ((), "", "the prompt is empty; aserve complete takes it as an argument, by --file or from a pipe"),
        (("--json-schema", "/none", "Hi"), "", "--json-schema: cannot read /none: No such file or directory"),
        (("--temperature", "9", "Hi"), "", "temperature must be in [0, 2], got 9.0"),
        (("busy",), "", "the server answers 429: too many requests (try again after 7 s)"),
        (("cut",), "", "the stream ended before the answer did"),
    ],
)
def test_what_goes_wrong_is_one_line_and_the_exit_status(words, stdin, told):
    with fake_openai() as server:
        done = aserve("complete", "--url", server.url, "--model", "m", *words, stdin=stdin)
    assert (done.code, done.err) == (1, f"aserve: {told}\n")


@pytest.mark.e2e
@pytest.mark.slow
def test_a_model_here_and_a_server_of_it_say_the_same(tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    asked = ("Once upon a time", "--max-tokens", "12", "--temperature", "0.8", "--seed", "5")
    structured = ("A number", "--chat", "--json-schema", str(schema), "--max-tokens", "40", "--seed", "5")
    with serving() as server:
        server.wait_until_ready()
        there = [aserve("complete", "--url", server.url, *words) for words in (asked, structured)]
    here = [aserve("complete", *HERE, *words) for words in (asked, structured)]
    assert [done.out for done in there] == [done.out for done in here]
    assert len(here[0].out) > 20
    assert here[0].err == "aserve: the answer was cut at its length; --max-tokens allows more\n"
    assert isinstance(json.loads(here[1].out)["a"], int)

"""`aserve batch`: answers into a file, and goes on where it was killed."""

import asyncio
import io
import json

import pytest

from aserve import AsyncEngine
from aserve.batch import answer_lines, answered_ids, read_lines, run_batch
from aserve.cli.flags import BatchOptions
from aserve.cli.settings import parse_command
from aserve.core.config import Options
from aserve.core.errors import ConfigError
from aserve.engine import Engine
from aserve.http.batch.lines import LineRunner
from tests.engines import says, scripted_engine, scripted_loader
from tests.http.faces import FACES, Asked
from tests.observe.explained import micro


def line(name, **body):
    body = {"prompt": "hi", "max_tokens": 3, **body}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}).encode()


async def test_lines_are_answered_once_and_a_cut_one_again(tmp_path):
    output = tmp_path / "out.jsonl"
    bar = io.StringIO()
    lines = [line("a"), line("b", temperature=9), b"{}", line("c")]
    async with scripted_engine() as engine:
        assert await answer_lines(engine, lines[:2], output, bar) == 1
        assert "2/2" in bar.getvalue()
        with output.open("ab") as file:
            file.write(b'{"custom_id": "c", "resp')
        assert await answer_lines(engine, lines, output, bar) == 2
        assert await answer_lines(engine, lines, output, bar) == 2, "nothing is left to answer, and two stay errors"
    told = {each["custom_id"]: each for each in map(json.loads, output.read_text().splitlines())}
    assert list(told) == ["a", "b", "line-3", "c"] or set(told) == {"a", "b", "line-3", "c"}
    assert len(output.read_text().splitlines()) == 4
    assert told["a"]["response"]["body"]["choices"][0]["text"] == told["c"]["response"]["body"]["choices"][0]["text"]
    assert told["b"]["response"]["status_code"] == 400
    assert told["line-3"]["error"]["code"] == "invalid_request_error"
    assert "4/4" in bar.getvalue()


async def test_a_line_without_a_name_takes_no_other_lines_name(tmp_path):
    """Catches a request that is never answered, since a malformed line before it was told by its name."""
    output = tmp_path / "out.jsonl"
    lines = [b"no JSON", line("line-1"), line("_line-1"), line("line-1"), line("c")]
    async with scripted_engine() as engine:
        await answer_lines(engine, lines, output, io.StringIO())
        written = output.read_bytes().splitlines(keepends=True)
        error = next(each for each in written if json.loads(each)["custom_id"].endswith("__line-1"))
        output.write_bytes(error)  # as if it had been killed there
        assert await answer_lines(engine, lines, output, io.StringIO()) == 2
    names = [json.loads(each)["custom_id"] for each in output.read_text().splitlines()]
    assert sorted(names) == ["__line-1", "_line-1", "c", "line-1", "line-4"]


def test_a_byte_order_mark_is_no_part_of_a_line(tmp_path):
    """Catches a first line that an editor of Windows has made unreadable."""
    (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + line("a") + b"\r\n")
    assert read_lines(str(tmp_path / "in.jsonl")) == [line("a") + b"\r"]


async def test_a_line_that_is_cancelled_by_nobody_ends_the_run(tmp_path, monkeypatch):
    """Catches a line that is missing in the output of a run which says that all is well."""

    async def cancelled(*_):
        raise asyncio.CancelledError

    monkeypatch.setattr(LineRunner, "run", cancelled)
    async with scripted_engine() as engine:
        with pytest.raises(RuntimeError, match="nobody cancelled"):
            await answer_lines(engine, [line("a")], tmp_path / "out.jsonl", io.StringIO())


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
async def test_a_line_that_asks_where_its_time_went_is_told(tmp_path, face):
    """Each line of its own request; one that does not ask is told nothing, one that asks wrongly is a line's 400."""
    output = tmp_path / "out.jsonl"
    asking = {"a": {"x_aserve": {"explain": True}}, "b": {}, "c": {"x_aserve": {"explian": True}}}
    lines = [
        json.dumps({"custom_id": name, "method": "POST", "url": face.url, "body": face.body(Asked()) | fields}).encode()
        for name, fields in asking.items()
    ]
    async with scripted_engine() as engine:
        await answer_lines(engine, lines, output, io.StringIO())
        told = {each["custom_id"]: each["response"] for each in map(json.loads, output.read_text().splitlines())}
        found = told["a"]["body"]["x_aserve"]["explanation"]
        kept = engine.explanation(found["id"])
    assert (found["state"], found["explained"], found["model"]) == ("ended", True, "scripted")
    assert sum(map(micro, found["phases_ms"].values())) == micro(found["total_ms"]) > 0
    assert found["phases_ms"] == dict(kept.phases_ms)
    assert told["b"]["status_code"] == 200
    assert "x_aserve" not in told["b"]["body"]
    assert told["c"]["status_code"] == 400
    assert "did you mean explain?" in told["c"]["body"]["error"]["message"]


@pytest.mark.parametrize("url", ["/v1/responses", "/v1/messages"])
async def test_lines_of_the_other_faces(tmp_path, url):
    body = (
        {"input": "hi"}
        if url == "/v1/responses"
        else {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    )
    asked = json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body}).encode()
    async with scripted_engine() as engine:
        assert await answer_lines(engine, [asked], tmp_path / "out.jsonl", io.StringIO()) == 0
    [told] = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    content = (
        told["response"]["body"]["output"][0]["content"] if "input" in body else told["response"]["body"]["content"]
    )
    assert content[0]["text"] == ("Hello, world!" if "input" in body else "Hello, wo")


def test_what_is_answered_ends_where_the_first_cut_line_begins(tmp_path):
    path = tmp_path / "out"
    whole = b'{"id":"batch_req_1","custom_id":"a","response":null,"error":{}}\n'
    for cut in (b"", b'{"id":"ba', b'{"id":"batch_req_2","custom_id":"b","resp', whole[:-1]):
        path.write_bytes(whole + cut)
        with path.open("a+b") as file:
            assert answered_ids(file).keys() == {"a"}
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"my notes\nand more\n", "line 1 of .* is no result of a batch; name another file"),
        (b"my notes", "line 1 of .* is no result"),
        (line("a") + b"\n", "line 1 of .* is no result"),
        (b'{"custom_id":"a","response":null,"error":{}}\n\xff\n', "line 2 of .* is no result"),
        (None, "is no file"),
    ],
)
def test_somebodys_file_is_no_output(tmp_path, content, message):
    """Catches a file that is emptied, or whose lines count as answers. No model is looked for before."""
    asked, output = tmp_path / "in", tmp_path / "out"
    asked.write_bytes(line("a"))
    output.mkdir() if content is None else output.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--output-file: .*{message}"):
        run_batch(Options(model="nowhere"), str(asked), str(output))
    assert content is None or output.read_bytes() == content
    with pytest.raises(ConfigError, match=r"--output-file: .*in is the input"):
        run_batch(Options(model="nowhere"), str(asked), str(asked))
    with pytest.raises(ConfigError, match=r"--output-file: .*nowhere is no folder"):
        run_batch(Options(model="nowhere"), str(asked), str(tmp_path / "nowhere/out"))


def test_the_command_line(tmp_path):
    parsed = parse_command(["batch", "demo", "-i", "a", "--output-file", "b"], {})
    assert (parsed.command, parsed.of(Options).model) == ("batch", "demo")
    assert parsed.of(BatchOptions) == BatchOptions(input_file="a", output_file="b")
    with pytest.raises(ConfigError, match="--output-file"):
        parse_command(["batch", "-i", "a"], {})
    with pytest.raises(ConfigError, match="cannot read"):
        read_lines(str(tmp_path / "none"))


async def test_an_id_that_is_there_twice_is_answered_once(tmp_path):
    output = tmp_path / "out.jsonl"
    async with scripted_engine() as engine:
        assert await answer_lines(engine, [line("a"), line("b"), line("a")], output, io.StringIO()) == 1
    told = {each["custom_id"]: each for each in map(json.loads, output.read_text().splitlines())}
    assert told.keys() == {"a", "b", "line-3"}
    assert "'a' is there twice" in told["line-3"]["error"]["message"]


def test_a_run_says_how_many_lines_have_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(AsyncEngine, "from_options", lambda *_, **__: Engine(scripted_loader(says("Hi"))))
    asked, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_bytes(line("a") + b"\n\n" + line("b", temperature=9))
    assert run_batch(Options(model="demo"), str(asked), str(output)) == 1
    assert f"aserve: 1 of 2 lines were answered by an error; see {output}\n" in capsys.readouterr().err
    assert run_batch(Options(model="demo"), str(asked), str(output)) == 1, "nothing is left to answer, and one failed"
    assert "aserve: 1 of 2 lines" in capsys.readouterr().err

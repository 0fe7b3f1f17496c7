"""response_format and structured_outputs over HTTP: what is answered, and what is a 400, under the field's own name."""

import json

import pytest

from aserve.http import create_app
from tests.engines import scripted_engine
from tests.fakes import FakeKV, ScriptedRunner
from tests.http.conftest import client_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 90},
    TEXT: {"prompt": "hi", "max_tokens": 90},
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
TAGS = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}


def formatted(schema: object, **fields: object) -> dict[str, object]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **fields}}}


@pytest.fixture
async def client():
    """Of an engine whose model knows all tokens, and heeds masks."""
    async with scripted_engine(runner=ScriptedRunner(model=FakeKV(8, range(260)))) as engine:
        async with client_of(create_app(engine)) as client:
            yield client
        assert engine.statistics().num_used_blocks == 0


async def ask(client, url, fields):
    response = await client.post(url, json={**BODIES[url], **fields})
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    return choice["message"]["content"] if url == CHAT else choice["text"], choice["finish_reason"]


@pytest.mark.parametrize("url", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("fields", "is_good"),
    [
        (formatted(SCHEMA), lambda text: 0 <= json.loads(text)["a"] <= 9),
        (formatted(SCHEMA, strict=True, description="d"), lambda text: list(json.loads(text)) == ["a"]),
        (formatted(SCHEMA, strict=False), lambda text: list(json.loads(text)) == ["a"]),
        ({"structured_outputs": {"json": SCHEMA}}, lambda text: list(json.loads(text)) == ["a"]),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, lambda text: list(json.loads(text)) == ["a"]),
        ({"structured_outputs": {"regex": "[xy]{3}"}}, lambda text: len(text) == 3 and set(text) <= {"x", "y"}),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "bc"'}}, lambda text: text in ("a", "bc")),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
async def test_an_answer_has_the_structure_that_was_asked_for(client, url, fields, is_good):
    text, reason = await ask(client, url, fields)
    assert is_good(text), text
    assert reason == "stop"


@pytest.mark.parametrize("url", [CHAT, TEXT])
async def test_objects_and_tags_begin_as_they_must(client, url):
    text, _ = await ask(client, url, {"response_format": {"type": "json_object"}})
    assert text.startswith("{")
    text, _ = await ask(client, url, {"structured_outputs": {"json_object": True}})
    assert text.startswith("{")
    for tags in (TAGS, json.dumps(TAGS)):
        await ask(client, url, {"structured_outputs": {"structural_tag": tags}})
    await ask(client, url, {"response_format": {"type": "structural_tag", **TAGS}})


@pytest.mark.parametrize("url", [CHAT, TEXT])
async def test_text_is_what_it_is_without(client, url):
    assert await ask(client, url, {"response_format": {"type": "text"}}) == await ask(client, url, {})


async def test_a_stream_says_what_the_whole_does(client):
    fields = {**BODIES[CHAT], **formatted(SCHEMA), "stream": True}
    text = ""
    async with client.stream("POST", CHAT, json=fields) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    assert text == (await ask(client, CHAT, formatted(SCHEMA)))[0]


@pytest.mark.parametrize("url", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        (formatted({"not": {}}), "response_format", "at #/not: cannot be enforced"),
        (formatted({"properties": {"a": {"minLength": "3"}}}), "response_format", "at #/properties/a/minLength"),
        (formatted({"$ref": "http://169.254.169.254/"}), "response_format", "nothing is fetched"),
        (formatted({"allOf": [{"type": "null"}, {"type": "array"}]}), "response_format", "at #: Unsatisfiable"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "required"),
        ({"response_format": {"type": "json_schema", "json_schema": None}}, "response_format", "needs json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": "{}"}}, "response_format", "expected object"),
        ({"response_format": {"type": "json_object", "triggers": ["a"]}}, "response_format", "has no triggers"),
        ({"response_format": {"type": "yaml"}}, "response_format", "nvalid"),
        ({"response_format": {"type": "text", "typ": 1}}, "response_format", "unknown field response_format.typ"),
        (formatted({}, shema={}), "response_format", "unknown field response_format.json_schema.shema"),
        ({"response_format": {"type": "structural_tag", "triggers": ["a"]}}, "response_format", "needs structures"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "got regex and choice"),
        ({"structured_outputs": {"json": ""}}, "structured_outputs", "json must be"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "json_object must be True"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "choice must be"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "structured_outputs.regex: "),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs", "unknown field structured_outputs.regx"),
        ({"structured_outputs": {"grammar": "start: nobody"}}, "structured_outputs", "nobody"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "must be a list of 1 to"),
        ({"structured_outputs": {"regex": "a"}, **formatted({})}, "structured_outputs", "leave one out"),
        ({"structured_outputs": {"regex": "a"}, "use_beam_search": True}, "structured_outputs", "beam search"),
    ],
    ids=lambda value: str(value)[:70],
)
async def test_what_cannot_be_is_a_400_that_says_so(client, url, fields, param, told):
    response = await client.post(url, json={**BODIES[url], **fields})
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == param
    assert told in error["message"], error


async def test_choices_have_the_structure_each(client):
    fields = {**BODIES[TEXT], "structured_outputs": {"regex": "[xyz]{4}"}, "n": 3, "best_of": 4, "seed": 3}
    choices = (await client.post(TEXT, json={**fields, "temperature": 1.0})).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 3
    assert all(len(choice["text"]) == 4 for choice in choices)

"""Adapters over HTTP: they answer as models, and come and go by vLLM's requests."""

from dataclasses import replace
from pathlib import Path

import pytest

from aserve.adapters import Adapters
from aserve.core.errors import AdapterError
from aserve.core.ids import AdapterId
from aserve.engine import Engine, EngineParts
from aserve.http import create_app
from tests.engines import scripted_loader
from tests.fakes import FakeScript, ScriptedRunner
from tests.http.conftest import client_of

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class FolderStore:
    """An `AdapterStore` that takes a folder for an adapter if it is there."""

    def load(self, adapter: AdapterId, folder: str) -> None:
        if not Path(folder).is_dir():
            raise AdapterError(f"{folder}: no such folder")

    def drop(self, adapter: AdapterId) -> None:
        pass


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner(model=FakeScript(list(b"ok")))


@pytest.fixture
async def client(runner: ScriptedRunner, tmp_path: Path):
    """Of an engine with the adapter "sql", and room for more under the root."""
    for name in ("sql", "more"):
        (tmp_path / name).mkdir()

    def load(report) -> EngineParts:
        parts = scripted_loader(runner=runner)(report)
        adapters = Adapters(FolderStore(), max_loaded=2, root=str(tmp_path), taken=parts.info.names)
        adapters.add_now("sql", str(tmp_path / "sql"))
        return replace(parts, adapters=adapters)

    async with Engine(load) as engine, client_of(create_app(engine)) as client:
        yield client


def adapters_run(runner: ScriptedRunner) -> set[int | None]:
    return {init.adapter for plan in runner.plans for init in plan.inits}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
    ],
    ids=str,
)
async def test_an_adapter_answers_under_its_name(client, runner, path, body):
    for model, adapter in (("sql", 0), ("scripted", None), (None, None)):
        runner.plans.clear()
        answer = await client.post(path, json=body | {"model": model})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == (model or "scripted")
        assert adapters_run(runner) == {adapter}
    streamed = await client.post(path, json=body | {"model": "sql", "stream": True})
    assert '"model":"sql"' in streamed.text


async def test_adapters_are_listed_with_their_parent(client, tmp_path):
    cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
    assert list(cards) == ["scripted", "also/scripted", "sql"]
    assert (cards["sql"]["parent"], cards["sql"]["root"]) == ("scripted", str(tmp_path / "sql"))
    assert cards["scripted"]["parent"] is None
    assert (await client.get("/v1/models/sql")).json() == cards["sql"]
    assert (await client.post("/tokenize", json={"prompt": "hi", "model": "sql"})).status_code == 200


async def test_adapters_are_loaded_and_unloaded(client, runner):
    answer = await client.post(LOAD, json={"lora_name": "more", "lora_path": "more"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'more' added successfully.")
    assert (await client.post("/v1/chat/completions", json=CHAT | {"model": "more"})).status_code == 200
    answer = await client.post(UNLOAD, json={"lora_name": "more", "lora_int_id": 7})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'more' removed successfully.")
    gone = await client.post("/v1/chat/completions", json=CHAT | {"model": "more"})
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "model")
    assert (await client.get("/v1/models/more")).status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (LOAD, {"lora_name": "x", "lora_path": "/etc"}, 400, "lora_path"),
        (LOAD, {"lora_name": "x", "lora_path": "../x"}, 400, "lora_path"),
        (LOAD, {"lora_name": "x", "lora_path": "nowhere"}, 400, "lora_path"),
        (LOAD, {"lora_name": "sql", "lora_path": "more"}, 400, "lora_name"),
        (LOAD, {"lora_name": "scripted", "lora_path": "more"}, 400, "lora_name"),
        (LOAD, {"lora_name": "a b", "lora_path": "more"}, 400, "lora_name"),
        (LOAD, {"lora_name": "x"}, 400, "lora_path"),
        (LOAD, {"lora_name": 1, "lora_path": "more"}, 400, "lora_name"),
        (LOAD, {"lora_name": "x", "lora_path": "more", "load_inplace": True}, 400, "load_inplace"),
        (LOAD, {"lora_name": "x", "lora_path": "more", "lora": 1}, 400, "lora"),
        (UNLOAD, {"lora_name": "x"}, 404, "model"),
        (UNLOAD, {}, 400, "lora_name"),
    ],
    ids=str,
)
async def test_what_is_wrong_is_named(client, path, body, status, param):
    answer = await client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]][2:] == ["sql"]


async def test_they_need_a_key_where_there_are_keys(tmp_path):
    engine = Engine(scripted_loader())
    async with engine, client_of(create_app(engine, api_keys=["key"])) as client:
        body = {"lora_name": "x", "lora_path": "more"}
        assert (await client.post(LOAD, json=body)).status_code == 401
        refused = await client.post(LOAD, json=body, headers={"Authorization": "Bearer key"})
        assert refused.status_code == 400
        assert "takes no adapters" in refused.json()["error"]["message"]

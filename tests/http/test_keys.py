"""Keys from a file: whose request it is, what it may use, and that no key is ever shown."""

import asyncio
import hashlib
import json
import logging

import pytest

from aserve.core.errors import ConfigError
from aserve.engine import Engine
from aserve.http import Keyring, create_app
from aserve.http.endpoint import duration
from aserve.http.keys import MAX_FILE_BYTES, MAX_KEYS, digest_of, parse_keys
from aserve.tenants import Limits, Tenant
from tests.engines import says, scripted_engine, scripted_loader
from tests.fakes import FakeClock, FakeScript, ScriptedRunner
from tests.http.conftest import client_of

CANARY = "sk-canary-9f3b"
FILE = f"""
- name: research
  key: {CANARY}
  weight: 2
  requests_per_minute: 3
  tokens_per_minute: 1000
  requests_at_once: 1
  isolate_cache: true
- name: shop
  key: [old-key, "sha256:{hashlib.sha256(b"new-key").hexdigest()}"]
"""
PROMPT = {"prompt": "a prompt of three blocks and more", "max_tokens": 4}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(FILE)
    return path


def test_a_file_says_whose_keys_there_are_and_what_they_may():
    keys = parse_keys(FILE)
    assert keys.tenants == [
        Tenant(
            name="research",
            weight=2.0,
            limits=Limits(requests_per_minute=3, tokens_per_minute=1000, requests_at_once=1),
            isolate_cache=True,
        ),
        Tenant(name="shop"),
    ]
    assert [name for _, name in keys.digests] == ["research", "shop", "shop"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- name: a\n  key: [", "not YAML (line 2)"),
        (f"- name: a\n  key: {CANARY}\n key: {CANARY}", "not YAML (line 3)"),
        ("", "list of tenants: Expected array, got null"),
        ("name: a", "Expected array, got object"),
        ("- name: a", "missing required field key"),
        ("- {name: a, key: 12345678}", "$[0].key"),
        ("- {name: a, key: ''}", "length >= 1"),
        ("- {name: a, key: []}", "length >= 1"),
        ("- {name: 'a b', key: k}", "$[0].name"),
        (f"- {{name: a, key: {CANARY}, wieght: 2}}", "unknown field wieght"),
        ("- {name: a, key: k, weight: 0}", "$[0].weight"),
        ("- {name: a, key: k, requests_per_minute: 0}", "$[0].requests_per_minute"),
        ("- {name: a, key: k, tokens_per_minute: 1.5}", "$[0].tokens_per_minute"),
        ("- {name: a, key: k}\n- {name: a, key: l}", "name a is in it 2 times"),
        (f"- {{name: a, key: {CANARY}}}\n- {{name: b, key: {CANARY}}}", "a key is in it twice"),
        ("- {name: a, key: 'sha256:123'}", "64 hexadecimal digits"),
        (f"- {{name: a, key: [{', '.join(f'k{i}' for i in range(MAX_KEYS + 1))}]}}", f"may have {MAX_KEYS} keys"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_without_a_character_of_a_key(text, problem):
    with pytest.raises(ConfigError) as caught:
        parse_keys(text)
    assert problem in caught.value.message
    assert CANARY not in caught.value.message


def test_a_key_that_looks_like_a_hash_is_a_key():
    key = "ab" * 32
    assert digest_of(key) == hashlib.sha256(key.encode()).digest()
    assert digest_of(f"sha256:{key}") == bytes.fromhex(key)


@pytest.mark.parametrize("key", ["", " ", "sesame ", "\tsesame"], ids=["empty", "blank", "behind", "before"])
def test_a_key_that_everybody_or_nobody_could_send_is_refused(key):
    """Catches a variable that was not set: its key is empty, and `Authorization: Bearer` opens the server."""
    with pytest.raises(ConfigError, match="a key may not") as refused:
        Keyring(["sesame", key])
    assert "sesame" not in refused.value.message
    with pytest.raises(ConfigError):
        parse_keys(json.dumps([{"name": "a", "key": key}]))


def test_the_hash_of_nothing_is_no_key():
    """Catches a hash that was made of a variable that was not set: `Authorization: Bearer` would have it."""
    entry = {"name": "a", "key": ["sesame", f"sha256:{hashlib.sha256(b'').hexdigest().upper()}"]}
    with pytest.raises(ConfigError, match="that of an empty text"):
        parse_keys(json.dumps([entry]))


def test_a_key_is_found_by_name(path):
    keyring = Keyring(["flag-key"], path=path)
    named = {key: keyring.tenant_of(key.encode()) for key in (CANARY, "old-key", "new-key", "flag-key", "nobody's", "")}
    assert named == {
        CANARY: "research",
        "old-key": "shop",
        "new-key": "shop",
        "flag-key": "",
        "nobody's": None,
        "": None,
    }
    assert not keyring.is_open
    assert Keyring().is_open


@pytest.mark.parametrize(
    "content", [b"- name: [", b"\xff\xfe", b"x" * (MAX_FILE_BYTES + 1), None], ids=["bad", "bytes", "large", "gone"]
)
def test_a_bad_file_is_refused_at_first_and_later_changes_nothing(path, caplog, content):
    keyring = Keyring(path=path)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="--api-keys-file"):
        Keyring(path=path)
    with caplog.at_level(logging.INFO):
        keyring.reload()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert keyring.tenant_of(CANARY.encode()) == "research"


def test_a_file_is_read_again(path, caplog):
    engine = Engine(scripted_loader())
    keyring = Keyring(path=path, tenants=engine.tenants)
    assert engine.tenants.account("research").tenant.weight == 2.0
    path.write_text(f"- {{name: lab, key: {CANARY}}}")
    with caplog.at_level(logging.INFO):
        keyring.reload()
    assert (keyring.tenant_of(CANARY.encode()), keyring.tenant_of(b"old-key")) == ("lab", None)
    assert engine.tenants.account("research").tenant == Tenant(name="research")
    assert [record.getMessage() for record in caplog.records] == ["the API keys were read again: 1 tenants"]


async def test_limits_answer_429_with_the_headers_that_clients_know(path):
    clock = FakeClock()
    engine = Engine(scripted_loader(says("Hello")), clock=clock)
    keyring = Keyring(path=path, tenants=engine.tenants)
    async with engine, client_of(create_app(engine, keyring=keyring)) as client:
        answers = [await client.post("/v1/completions", json=PROMPT, headers=bearer(CANARY)) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0", "0"]
        last = answers[-1]
        assert (last.headers["retry-after"], last.headers["x-ratelimit-limit-requests"]) == ("20", "3")
        assert (last.headers["x-ratelimit-reset-requests"], last.headers["x-ratelimit-limit-tokens"]) == (
            "1m0s",
            "1000",
        )
        error = last.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        clock.advance(20.0)
        assert (await client.post("/v1/completions", json=PROMPT, headers=bearer(CANARY))).status_code == 200
        for _ in range(9):
            other = await client.post("/v1/completions", json=PROMPT, headers=bearer("new-key"))
            assert other.status_code == 200
        assert not [name for name in other.headers if name.startswith("x-ratelimit")]


async def test_a_stream_is_open_until_its_end(path):
    runner = ScriptedRunner(model=FakeScript(says("Hello")))
    engine = Engine(scripted_loader(runner=runner))
    keyring = Keyring(path=path, tenants=engine.tenants)
    async with engine, client_of(create_app(engine, keyring=keyring)) as client, asyncio.TaskGroup() as group:
        runner.hold()
        streaming = group.create_task(
            client.post("/v1/completions", json=PROMPT | {"stream": True}, headers=bearer(CANARY))
        )
        for _ in range(100):
            await asyncio.sleep(0)
        refused = await client.post("/v1/completions", json=PROMPT, headers=bearer(CANARY))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        runner.let_land()
        assert (await streaming).status_code == 200
        assert (await client.post("/v1/completions", json=PROMPT, headers=bearer(CANARY))).status_code == 200


async def test_usage_and_metrics_say_the_name_and_nobody_sees_anothers(path):
    engine = scripted_engine(says("Hello"))
    keyring = Keyring(path=path, tenants=engine.tenants)
    async with engine, client_of(create_app(engine, keyring=keyring)) as client:
        for _ in range(2):
            await client.post("/v1/completions", json=PROMPT, headers=bearer("old-key"))
        used = (await client.get("/v1/usage", headers=bearer("new-key"))).json()
        assert used == {
            "object": "usage",
            "tenant": "shop",
            "num_open": 0,
            "num_requests": 2,
            "num_refused": 0,
            "num_prompt_tokens": 66,
            "num_cached_tokens": 32,
            "num_generated_tokens": 8,
            "limits": {},
        }
        others = (await client.get("/v1/usage", headers=bearer(CANARY))).json()
        assert (others["tenant"], others["num_requests"]) == ("research", 0)
        assert others["limits"]["requests"] == {"limit": 3, "remaining": 3, "reset_s": 0.0}
        assert (await client.get("/v1/usage")).status_code == 401
        scraped = (await client.get("/metrics")).text
        assert 'aserve_tenant_generation_tokens_total{model_name="scripted",tenant="shop"} 8.0' in scraped
        assert not [key for key in (CANARY, "old-key", "new-key") if key in scraped]


async def test_a_tenant_can_have_a_cache_of_its_own(path):
    path.write_text("- {name: a, key: ka, isolate_cache: true}\n- {name: b, key: kb}\n- {name: c, key: kc}")
    engine = scripted_engine(says("Hello"))
    keyring = Keyring(path=path, tenants=engine.tenants)
    async with engine, client_of(create_app(engine, keyring=keyring)) as client:

        async def num_cached(key: str) -> int:
            answer = await client.post("/v1/completions", json=PROMPT, headers=bearer(key))
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [await num_cached(key) for key in ("kb", "kc", "ka", "ka", "kb")] == [0, 32, 0, 32, 32]


@pytest.mark.parametrize(
    ("seconds", "spelled"),
    [(0.0, "0ms"), (0.02, "20ms"), (0.999, "999ms"), (1.0, "1s"), (1.5, "1.5s"), (59.9996, "1m0s"), (360.0, "6m0s")],
)
def test_times_are_spelled_as_openai_does(seconds, spelled):
    assert duration(seconds) == spelled

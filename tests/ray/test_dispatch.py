"""What the ingress does with requests, over replicas that do as they are told: no Ray."""

import json

import httpx
import msgspec
import pytest

from aserve.cli.flags import ServerOptions
from aserve.ray.carried import Head, Tail, Whole
from aserve.ray.face import face
from tests.ray.replicas import GONE, JSON, SSE, FakeReplicas, refusal, stream

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
PIECES = (b'data: {"one":1}\n\n', b"data: [DONE]\n\n")


def client_of(replicas: FakeReplicas, **options) -> httpx.AsyncClient:
    app = face(replicas, ServerOptions(), **options)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://aserve")


async def test_an_answer_comes_as_the_replica_gives_it():
    """Catches pieces that are changed, and a header that Serve's proxy says a second time."""
    replicas = FakeReplicas(a=stream("a", *PIECES))
    async with client_of(replicas) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.content) == (200, b"".join(PIECES))
    assert answer.headers["x-aserve-replica"] == "a"
    assert "x-request-id" not in answer.headers
    assert replicas.carried[0].request_id == "mine"
    assert json.loads(replicas.carried[0].body) == CHAT


@pytest.mark.parametrize("script", [[GONE], [Head(200, SSE, "a"), GONE], refusal("a"), refusal("a", 503)])
async def test_what_has_not_begun_is_sent_elsewhere(script):
    """Catches a client that hears of a replica's end though nothing had been said."""
    replicas = FakeReplicas(a=script, b=stream("b", *PIECES))
    async with client_of(replicas) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.content) == (200, b"".join(PIECES))
    assert answer.headers["x-aserve-replica"] == "b"
    assert [(name, target.avoid) for name, _, target in replicas.asked] == [("a", ()), ("b", ("a",))]


async def test_who_is_refused_everywhere_hears_it_as_it_was_said():
    """Catches a 429 without its Retry-After, and tries without end."""
    replicas = FakeReplicas(a=refusal("a"), b=refusal("b"), c=refusal("c"))
    async with client_of(replicas, retries=2) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert answer.json()["error"]["code"] == "engine_overloaded"
    assert [name for name, _, _ in replicas.asked] == ["a", "b", "c"]


async def test_without_any_replica_it_is_a_503():
    async with client_of(FakeReplicas(a=[GONE], b=[GONE])) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/chat/completions", b'data: {"error":'),
        ("/v1/completions", b'data: {"error":'),
        ("/v1/messages", b'event: error\ndata: {"type":"error"'),
        ("/v1/responses", b'event: error\ndata: {"type":"error","code":"replica_lost"'),
    ],
)
async def test_a_stream_whose_replica_goes_ends_with_an_error_in_it(path, told):
    """Catches a bare cut, and an error in another API's words."""
    replicas = FakeReplicas(a=[Head(200, SSE, "a"), PIECES[0], GONE], b=stream("b", *PIECES))
    async with client_of(replicas) as client:
        answer = await client.post(path, json=CHAT)
    assert answer.content.startswith(PIECES[0] + told)
    assert len(replicas.asked) == 1  # what has begun is not sent again
    assert (b"data: [DONE]" in answer.content) == ("completions" in path)


async def test_an_answer_without_a_tail_is_no_answer():
    """Catches an end of the iteration that is taken for the end of the answer."""
    replicas = FakeReplicas(a=[Head(200, SSE, "a"), PIECES[0]], b=stream("b", *PIECES))
    async with client_of(replicas) as client:
        assert b"replica_lost" in (await client.post("/v1/chat/completions", json=CHAT)).content


async def test_the_router_is_told_what_a_request_begins_with_and_whose_it_is():
    replicas = FakeReplicas(a=stream("a", *PIECES))
    async with client_of(replicas) as client:
        bodies = [CHAT, {**CHAT, "messages": [*CHAT["messages"], {"role": "user", "content": "x" * 2000}]}]
        for body in [*bodies, {**CHAT, "model": "poet", "prompt_cache_key": "s"}]:
            await client.post("/v1/chat/completions", json=body, headers={"X-Session-Id": "one"})
        await client.get("/v1/models")
        await client.post("/v1/chat/completions", content=b"no json")
    asks = [ask for _, ask, _ in replicas.asked]
    assert asks[0].session == asks[1].session == "one"
    assert asks[1].keys.num_bytes > asks[0].keys.num_bytes > 0
    assert [ask.adapter for ask in asks] == ["", "", "poet", "", ""]
    assert asks[3].keys.hashes == asks[4].keys.hashes == ()


async def test_a_request_may_name_its_replica():
    replicas = FakeReplicas(a=stream("a", *PIECES), b=refusal("b"))
    async with client_of(replicas) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT, headers={"X-Aserve-Replica": "b"})
        assert (answer.status_code, answer.headers["x-aserve-replica"]) == (429, "b")
        answer = await client.post("/v1/chat/completions", json=CHAT, headers={"X-Aserve-Replica": "z"})
        assert answer.status_code == 503


async def test_a_retry_is_answered_without_any_replica():
    """Catches a key that is looked up behind the router."""
    replicas = FakeReplicas(a=stream("a", *PIECES))
    async with client_of(replicas) as client:
        for _ in range(2):
            answer = await client.post("/v1/chat/completions", json=CHAT, headers={"Idempotency-Key": "k"})
            assert answer.content == b"".join(PIECES)
    assert len(replicas.asked) == 1
    assert b"idempotency-key" not in dict(replicas.carried[0].headers)


@pytest.mark.parametrize("end", [GONE, Tail("engine_error")])
async def test_what_failed_in_a_stream_is_not_kept(end):
    replicas = FakeReplicas(a=[Head(200, SSE, "a"), PIECES[0], end])
    async with client_of(replicas) as client:
        for _ in range(2):
            await client.post("/v1/chat/completions", json=CHAT, headers={"Idempotency-Key": "k"})
    assert len(replicas.asked) == 2


async def test_health_and_readiness_are_of_the_whole():
    replicas = FakeReplicas(a=[], b=[])
    async with client_of(replicas) as client:
        replicas.states["a"] = "draining"
        answer = await client.get("/ready")
        assert (answer.status_code, answer.json()["status"]) == (200, "ready")
        states = [(each["replica"], each["state"]) for each in answer.json()["replicas"]]
        assert states == [("a", "draining"), ("b", "ready")]
        replicas.states = {"a": "draining"}
        assert [(await client.get(path)).status_code for path in ("/ready", "/health", "/ping")] == [503, 200, 200]
        assert (await client.get("/health")).json()["status"] == "draining"
        replicas.states = {"a": "dead"}
        assert (await client.get("/health")).status_code == 503
        replicas.states = {}
        assert (await client.get("/health")).status_code == 503


async def test_metrics_are_of_all_replicas_by_label():
    async with client_of(FakeReplicas(a=[], b=[])) as client:
        text = (await client.get("/metrics")).text
    assert text == (
        '# HELP a Of a.\n# TYPE a gauge\na{replica="a"} 1.0\na{replica="b"} 1.0\n'
        '# HELP b Of b.\nb{replica="a",x="a"} 2.0\nb{replica="b",x="b"} 2.0\n'
    )


def whole(name: str, content: object, status: int = 200) -> Whole:
    return Whole(status, JSON, name, msgspec.json.encode(content))


async def test_what_is_asked_of_all_is_put_together():
    replicas = FakeReplicas(a=[], b=[])
    async with client_of(replicas) as client:
        replicas.wholes = {"a": whole("a", {"server_load": 3}), "b": whole("b", {"server_load": 4})}
        assert (await client.get("/load")).json() == {"server_load": 7}
        usage = {"object": "usage", "num_requests": 1, "limits": {"requests": {"limit": 5}}}
        replicas.wholes = {"a": whole("a", usage), "b": whole("b", usage)}
        summed = {"object": "usage", "num_requests": 2, "limits": {"requests": {"limit": 10}}}
        assert (await client.get("/v1/usage")).json() == summed
        replicas.wholes = {
            name: whole(name, {"data": [{"id": name, "created_at": at}]}) for at, name in enumerate("ab")
        }
        answer = (await client.get("/v1/files")).json()
        assert [each["id"] for each in answer["data"]] == ["b", "a"]
        assert (answer["first_id"], answer["last_id"], answer["has_more"]) == ("b", "a", False)
        replicas.wholes = {"a": whole("a", {}), "b": whole("b", {"error": {}}, 400)}
        assert (await client.post("/v1/load_lora_adapter", json={})).status_code == 400
        replicas.wholes = {}
        assert (await client.get("/load")).status_code == 503


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/responses/resp_1", None),
        ("DELETE", "/v1/files/file_1", None),
        ("POST", "/v1/batches", {"input_file_id": "file_1"}),
        ("POST", "/v1/responses", {"input": "x", "previous_response_id": "resp_1"}),
    ],
)
async def test_what_one_replica_keeps_is_found(method, path, body):
    """Catches a 404 of a replica that was not the one."""
    replicas = FakeReplicas(a=refusal("a", 404), b=[Head(200, JSON, "b"), b"{}", Tail()], c=refusal("c", 404))
    async with client_of(replicas) as client:
        answer = await client.request(method, path, json=body)
        assert (answer.status_code, answer.headers["x-aserve-replica"]) == (200, "b")
        assert [name for name, _, _ in replicas.asked] == ["a", "b"]
        del replicas.scripts["b"], replicas.states["b"]
        assert (await client.request(method, path, json=body)).status_code == 404

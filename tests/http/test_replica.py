"""What a server behind a router tells of itself: which prompts it has cached, and what waits."""

from typing import Any

import pytest

from aserve.core.errors import UnavailableError
from aserve.http import AppOptions, create_app
from aserve.http.replica import Replica
from aserve.routing import Ask, Reason, Router, keys_of
from aserve.routing.digest import Digest, num_leading
from aserve.routing.ledger import Ledger
from tests.engines import scripted_engine
from tests.http.conftest import client_of

TEXT = "The quick brown fox jumps over the lazy dog. " * 40
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}]},
    "/v1/completions": {"prompt": TEXT},
    "/v1/responses": {"input": TEXT},
    "/v1/messages": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2},
}


def num_held(replica: Replica, body: dict[str, Any]) -> int:
    """How many beginnings of the body's prompt the replica says to hold."""
    digest = Digest(replica.report().digest or b"")
    return num_leading(keys_of(body).hashes, digest.__contains__)


@pytest.mark.parametrize("path", list(BODIES))
async def test_a_prompt_that_was_served_is_held_until_its_blocks_are_gone(path: str):
    engine = scripted_engine(max_model_len=4096, num_blocks=600)
    replica = Replica(engine)
    body = {"model": "scripted", **BODIES[path]}
    async with engine, client_of(create_app(engine, options=AppOptions(replica=replica))) as client:
        assert replica.report().digest == b""
        assert (await client.post(path, json=body)).status_code == 200
        assert num_held(replica, body) >= 6, "of 7 beginnings of 1800 bytes"
        assert num_held(replica, {**body, "cache_salt": "another"}) == 0
        longer = TEXT + "And so on. " * 300
        assert num_held(replica, {"model": "scripted", "prompt": longer}) == (7 if path == "/v1/completions" else 0)
        engine.reset_prefix_cache()
        assert replica.report().digest == b""


async def test_evicted_blocks_are_not_told():
    engine = scripted_engine(max_model_len=4096, num_blocks=300)
    replica = Replica(engine)
    async with engine, client_of(create_app(engine, options=AppOptions(replica=replica))) as client:
        for letter in "abc":
            await client.post("/v1/completions", json={"model": "scripted", "prompt": letter * 1600})
        held = [num_held(replica, {"model": "scripted", "prompt": letter * 1600}) for letter in "abc"]
        assert held[0] < held[2] == 6, "300 blocks of 8 tokens hold one and a half of them"


async def test_the_report_counts_what_came_and_was_computed():
    engine = scripted_engine(max_model_len=4096, num_blocks=600)
    replica = Replica(engine, clock=lambda: 5.0)
    with pytest.raises(UnavailableError):
        replica.report()
    async with engine, client_of(create_app(engine, options=AppOptions(replica=replica))) as client:
        before = replica.report()
        await client.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 3})
        after = replica.report()
    assert (before.num_arrived_tokens, before.num_computed_tokens, before.tokens_per_s) == (0, 0, None)
    assert after.taken_at == 5.0
    assert after.num_arrived_tokens == len(TEXT)
    assert after.num_computed_tokens == len(TEXT) + 2
    assert (after.num_requests, after.waiting_tokens, after.adapters) == (0, 0, ())
    assert after.bytes_per_token == pytest.approx(1.0), "a token a byte"


async def test_a_router_sends_the_next_turn_where_the_first_one_was_served():
    router, now = Router(seed=3), 10.0
    engines = {name: scripted_engine(max_model_len=4096, num_blocks=600) for name in ("one", "two", "three")}
    replicas = {name: Replica(engine, clock=lambda: now) for name, engine in engines.items()}
    async with engines["one"], engines["two"], engines["three"]:
        app = create_app(engines["two"], options=AppOptions(replica=replicas["two"]))
        first = {"model": "scripted", "messages": [{"role": "user", "content": TEXT}]}
        async with client_of(app) as client:
            await client.post("/v1/chat/completions", json=first)
        for name, replica in replicas.items():
            router.reported(name, replica.report(), now)
        turns = [*first["messages"], {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Go on"}]
        choice = router.choose(list(replicas), Ask(id="a", keys=keys_of({**first, "messages": turns})), now)
        assert (choice.ranked[0], choice.reason) == ("two", Reason.PREFIX)
        assert choice.cached_tokens > 1500


class Broken(Ledger):
    """Raises in one of its calls."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self._at = at

    def came(self, *arguments: Any) -> None:
        assert self._at != "came", "a bug"
        super().came(*arguments)

    def awaits(self, name: str) -> bool:
        assert self._at != "awaits", "a bug"
        return super().awaits(name)

    def ended(self, *arguments: Any) -> None:
        assert self._at != "ended", "a bug"
        super().ended(*arguments)


@pytest.mark.parametrize("at", ["came", "awaits", "ended"])
async def test_an_answer_does_not_depend_on_what_is_remembered(at: str, caplog: pytest.LogCaptureFixture):
    engine = scripted_engine(max_model_len=4096, num_blocks=600)
    replica = Replica(engine, ledger=Broken(at))
    async with engine, client_of(create_app(engine, options=AppOptions(replica=replica))) as client:
        for _ in range(2):
            answer = await client.post("/v1/completions", json={"prompt": TEXT})
            assert answer.status_code == 200
        assert replica.report().digest == b""
    assert "AssertionError" in caplog.text


async def test_several_prompts_failures_and_bodies_that_are_none_do_no_harm():
    engine = scripted_engine(max_model_len=4096, num_blocks=600)
    replica = Replica(engine)
    async with engine, client_of(create_app(engine, options=AppOptions(replica=replica))) as client:
        asked = [{"prompt": [TEXT, "hi"]}, {"prompt": TEXT, "max_tokens": -1}, {"prompt": 5}, {}, {"prompt": ""}]
        codes = [(await client.post("/v1/completions", json=body)).status_code for body in asked]
        assert codes[0] == 200
        assert all(400 <= code < 500 for code in codes[1:])
        assert num_held(replica, {"prompt": TEXT}) == 0
        assert (await client.post("/v1/completions", json={"prompt": [TEXT]})).status_code == 200
        assert num_held(replica, {"prompt": TEXT}) >= 6

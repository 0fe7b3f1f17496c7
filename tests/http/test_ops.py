"""What operators set and ask for: the prefix cache forgotten, a queue with an end, swapping in the metrics."""

import asyncio
from dataclasses import replace

import pytest

from aserve.engine import Engine
from aserve.http import create_app
from aserve.scheduler.scheduler import Scheduler
from tests.engines import says, scripted_engine, scripted_loader
from tests.fakes import FakeScript, ScriptedRunner
from tests.http.conftest import client_of

PROMPT = {"prompt": "a prompt of three blocks and more", "max_tokens": 4}


async def test_a_reset_forgets_what_was_cached(client):
    async def num_cached():
        usage = (await client.post("/v1/completions", json=PROMPT)).json()["usage"]
        return (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)

    assert [await num_cached() for _ in range(2)] == [0, 32]
    answer = await client.post("/reset_prefix_cache")
    assert (answer.status_code, answer.json()) == (200, {"num_blocks": 4})
    assert [await num_cached() for _ in range(2)] == [0, 32]
    assert (await client.get("/reset_prefix_cache")).status_code == 405


async def test_a_reset_needs_a_key_and_an_engine():
    async with client_of(create_app(scripted_engine(), api_keys=["key"])) as client:
        assert (await client.post("/reset_prefix_cache")).status_code == 401
        answer = await client.post("/reset_prefix_cache", headers={"Authorization": "Bearer key"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")


async def test_a_full_queue_is_a_429_with_retry_after():
    runner = ScriptedRunner(model=FakeScript(says("Hello")))
    runner.hold()
    load = scripted_loader(runner=runner)
    limits = {"block_size": 8, "num_blocks": 64, "max_num_batched_tokens": 64, "max_model_len": 128}
    scheduler = Scheduler(**limits, max_num_seqs=1, max_num_queued_reqs=1)
    engine = Engine(lambda report: replace(load(report), scheduler=scheduler))
    async with engine, client_of(create_app(engine)) as client, asyncio.TaskGroup() as group:
        taken = []
        for num_running, num_waiting in ((1, 0), (1, 1)):
            taken.append(group.create_task(client.post("/v1/completions", json=PROMPT)))
            for _ in range(100):
                await asyncio.sleep(0)
            counts = engine.statistics()
            assert (counts.num_running, counts.num_waiting) == (num_running, num_waiting)
        refused = await client.post("/v1/completions", json=PROMPT)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "engine_overloaded")
        assert "1 requests are waiting" in error["message"]
        runner.let_land()
        assert [(await task).status_code for task in taken] == [200, 200]
        assert (await client.post("/v1/completions", json=PROMPT)).status_code == 200


@pytest.mark.parametrize("more", [{}, {"best_of": 3, "n": 2}], ids=["choices", "ranked"])
async def test_what_was_asked_for_and_came_of_it_is_scraped_once_a_request(engine, client, more):
    """Catches choices whose tokens are added up, and one that is counted as a request."""
    asked = {"prompt": "abc", "max_tokens": 9, "n": 2, "ignore_eos": True, **more}
    usage = (await client.post("/v1/completions", json=asked)).json()["usage"]
    assert usage["completion_tokens"] == 18
    read = engine.registry.get_sample_value
    sums = {"request_params_n": 2, "request_params_max_tokens": 9, "request_max_num_generation_tokens": 9}
    for name, value in {**sums, "request_generation_tokens": 18, "request_prompt_tokens": 3}.items():
        assert read(f"aserve_{name}_count", {"model_name": "scripted"}) == 1, name
        assert read(f"aserve_{name}_sum", {"model_name": "scripted"}) == value, name
    num_tokens = read("aserve_iteration_tokens_total_sum", {"model_name": "scripted"})
    assert num_tokens >= 3 + 8 * 2
    assert read("aserve_iteration_tokens_total_count", {"model_name": "scripted"}) >= 9


async def test_what_memory_pressure_does_is_scraped(client):
    text = (await client.get("/metrics")).text
    for name in ("num_requests_swapped", "num_swap_outs_total", "swapped_blocks_total", "copied_blocks_total"):
        assert f'aserve_{name}{{model_name="scripted"}} 0.0' in text

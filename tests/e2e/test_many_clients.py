"""Many clients at once, some of whom leave: nothing is left behind, and nobody's answer depends on the others."""

import asyncio
import random
from contextlib import suppress

import httpx
import openai
import pytest

from tests.e2e.server_process import CHAT, question, serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_CLIENTS = 64


@pytest.fixture(scope="module")
def server():
    """Small enough that requests wait and are preempted; in float32, where a batch gives what each would alone."""
    with serving(
        *("--dtype", "float32", "--kv-cache-memory-bytes", "2Mi", "--max-model-len", "256"),
        *("--max-num-seqs", "24", "--max-num-batched-tokens", "96"),
    ) as server:
        yield server.wait_until_ready()


def requests_of(rng):
    """Prompts of 1 to 100 tokens, half of them with a common beginning, and caps of 4 to 60 tokens."""
    common = [rng.randrange(300) for _ in range(40)]
    for i in range(NUM_CLIENTS):
        own = [rng.randrange(300) for _ in range(rng.randint(1, 60))]
        yield common * (i % 2) + own, rng.randint(4, 60)


async def stream_answer(client, prompt, max_tokens, leave_after=None):
    """The token ids of an answer; None when the client left after so many chunks."""
    token_ids = []
    async with await client.completions.create(
        model="demo",
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    ) as stream:
        num_chunks = 0
        async for chunk in stream:
            num_chunks += 1
            if num_chunks == leave_after:
                return None
            token_ids += chunk.choices[0].token_ids
    assert len(token_ids) == max_tokens
    return token_ids


async def test_streams_with_random_aborts(server):
    rng = random.Random(1)
    requests = list(requests_of(rng))
    leavings = [rng.randint(1, 30) if rng.random() < 0.4 else None for _ in requests]
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        together = await asyncio.gather(
            *(stream_answer(client, *request, leave) for request, leave in zip(requests, leavings, strict=True))
        )
        server.wait_until_idle()
        num_completed = 0
        for request, answer in zip(requests, together, strict=True):
            if answer is not None:
                num_completed += 1
                assert answer == await stream_answer(client, *request)
    assert NUM_CLIENTS / 2 < num_completed < NUM_CLIENTS
    assert server.metric("aserve_num_preemptions_total") > 0
    assert server.metric("aserve_prefix_cache_hits_total") > 0
    assert server.metric("aserve_request_success_total", finished_reason="abort") > 0
    assert server.metric("aserve_step_failures_total") == 0
    server.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_clients_that_leave_while_they_wait_for_the_first_byte(server, stream):
    """At most 24 run and the others wait: all of them are cancelled, and the connections closed."""
    body = question("Hello!", ignore_eos=True, stream=stream)
    async with httpx.AsyncClient(base_url=server.url, timeout=30.0, limits=httpx.Limits()) as client:
        tasks = [asyncio.create_task(client.post(CHAT, json=body)) for _ in range(40)]
        await asyncio.to_thread(server.wait_until_some_run_and_some_wait)
        assert not all(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    server.wait_until_idle()


async def test_a_client_that_leaves_takes_nobody_with_it(server):
    """Clients that vanish in the midst of their request, beside one that stays."""
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        alone = await stream_answer(client, [1, 2, 3], 50)
        staying = asyncio.create_task(stream_answer(client, [1, 2, 3], 50))
        for _ in range(20):
            _, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
            await writer.drain()
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        assert await staying == alone
    server.wait_until_idle()

"""A seeded request says the same alone, in any batch, after preemption, under any chunking; with penalties and bans."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aserve.scheduler.scheduler import Scheduler
from tests.runner.toy import answer, request, toy_runner

pytestmark = pytest.mark.torch

PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "top_p": st.sampled_from([1.0, 0.8]),
        "seed": st.integers(0, 2**63 - 1),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.5, -1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.8]),
        "logit_bias": st.sampled_from([(), ((5, 4.0), (6, -100.0))]),
        "allowed_token_ids": st.sampled_from([None, tuple(range(5, 25))]),
        "logprobs": st.sampled_from([None, 2]),
        "max_tokens": st.integers(1, 10),
    }
)
REQUESTS = st.lists(st.tuples(st.lists(st.integers(1, 90), min_size=1, max_size=9), PARAMS), min_size=2, max_size=5)


def run(requests, *, num_blocks=32, max_num_batched_tokens=64, depth=2):
    scheduler = Scheduler(
        block_size=4,
        num_blocks=num_blocks,
        max_num_seqs=8,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=64,
        watermark=0.0,
    )
    tokens = asyncio.run(answer(toy_runner(num_blocks=num_blocks), scheduler, requests, depth=depth))
    return tokens, scheduler.statistics().num_preemptions


@pytest.mark.slow
@settings(max_examples=3)  # each answers every request alone as well
@given(asked=REQUESTS, num_blocks=st.integers(7, 14), budget=st.integers(2, 20), depth=st.integers(1, 2))
def test_together_as_alone(asked, num_blocks, budget, depth):
    requests = [request(f"request {i}", prompt, **params) for i, (prompt, params) in enumerate(asked)]
    alone = {one.id: run([one])[0][one.id] for one in requests}
    together, _ = run(requests, num_blocks=num_blocks, max_num_batched_tokens=budget, depth=depth)
    assert together == alone


def test_penalised_requests_survive_preemption():
    params = {"temperature": 1.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5, "max_tokens": 12}
    requests = [request(f"request {i}", [i, i + 1, 7], seed=i, **params) for i in range(5)]
    alone = {one.id: run([one])[0][one.id] for one in requests}
    together, num_preemptions = run(requests, num_blocks=10, max_num_batched_tokens=8)
    assert num_preemptions > 0
    assert together == alone
    plain = run([request("plain", [1, 2, 7], seed=1, temperature=1.0, max_tokens=12)])[0]["plain"]
    assert plain != alone["request 1"], "penalties change something"

"""A budget of thinking tokens over HTTP: alone, before a structure, before calls, in several choices, preempted."""

import asyncio
import json

import pytest

from aserve.http import create_app
from tests.engines import scripted_engine
from tests.http.conftest import client_of
from tests.http.test_tools import HI, TEMPLATE, TOOLS, ask, masked, speaking

URL = "/v1/chat/completions"
BEGUN = TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}"
"""A template that begins the thought, as many do."""
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}


async def test_thoughts_end_at_their_budget_and_the_answer_goes_on():
    """Fault: a budget that is not heeded, or whose end is read as something else."""
    async with speaking(template=BEGUN) as engine:
        free = await ask(engine, max_tokens=40, logit_bias={"256": -100})
        assert len(free["reasoning"]) > 15
        assert free["content"] == ""
        bound = await ask(engine, max_tokens=40, logit_bias={"256": -100}, thinking_token_budget=6)
    assert 0 < len(bound["reasoning"].encode()) < 6 * 4
    assert free["reasoning"].startswith(bound["reasoning"][:4])
    assert len(bound["content"]) > 5


@pytest.mark.parametrize("budget", [0, 9])
async def test_a_structure_follows_what_a_budget_ends(budget):
    async with speaking(template=BEGUN) as engine:
        answer = await ask(engine, thinking_token_budget=budget, response_format=FORMAT)
        assert bool(answer["reasoning"]) == bool(budget)
        assert json.loads(answer["content"]) in ("yes", "no")
        many = await choices(engine, thinking_token_budget=budget, response_format=FORMAT, n=3)
    assert {json.loads(choice["message"]["content"]) for choice in many} <= {"yes", "no"}


@pytest.mark.parametrize("call_format", ["hermes", "pythonic", "qwen3_coder", "gemma4"])
async def test_a_required_call_follows_what_a_budget_ends(call_format):
    async with speaking(template=BEGUN, call_format=call_format) as engine:
        answer = await ask(engine, thinking_token_budget=5, tool_choice="required", tools=TOOLS[:1])
    assert answer["reasoning"]
    assert json.loads(answer["tool_calls"][0]["function"]["arguments"]).keys() == {"city"}


async def test_choices_and_crowds_are_what_they_are_alone():
    """Fault: the count of one answer's thoughts in another's, or lost when its blocks are taken."""
    fields = {"thinking_token_budget": 7, "max_tokens": 60, "logit_bias": {"256": -100}}
    async with speaking(template=BEGUN) as engine:
        alone = [await choices(engine, **fields, seed=seed) for seed in range(4)]
    runner = masked()
    async with speaking(template=BEGUN, num_blocks=28, runner=runner) as engine:
        runner.hold()  # until all of them are there
        crowd = asyncio.gather(*(choices(engine, **fields, seed=seed) for seed in range(4)))
        while (there := engine.statistics()).num_running + there.num_waiting < 4:  # noqa: ASYNC110  no event says so
            await asyncio.sleep(0.001)
        runner.let_land()
        crowd = await crowd
        assert engine.statistics().num_preemptions > 0
    assert crowd == alone


async def test_where_no_thoughts_are_known_a_budget_is_refused():
    async with scripted_engine() as engine, client_of(create_app(engine)) as client:
        for budget, told in ((5, "thoughts"), (-1, "got -1")):
            response = await client.post(URL, json={"messages": HI, "thinking_token_budget": budget})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "thinking_token_budget")
            assert told in error["message"]


async def choices(engine, **fields):
    async with client_of(create_app(engine)) as client:
        response = await client.post(URL, json={"messages": HI, "seed": 1, **fields})
        assert response.status_code == 200, response.text
        return response.json()["choices"]

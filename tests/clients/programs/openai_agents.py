"""openai-agents and its default model against a server: what each kind of run comes to, as JSON."""

import asyncio
import json
import sys

from agents import (
    Agent,
    ModelSettings,
    Runner,
    SQLiteSession,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

QUESTION = "What is aserve?"
GREEDY = ModelSettings(temperature=0)


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"It rains in {city[:8]}."


class Total(BaseModel):
    """What an answer has to be."""

    total: int


def agent(settings=GREEDY, **fields):
    return Agent(name="assistant", model="demo", model_settings=settings, **fields)


def kinds(result):
    return [type(item).__name__ for item in result.new_items]


async def streamed():
    result = Runner.run_streamed(agent(), QUESTION)
    events = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
    return {"answer": result.final_output, "events": list(dict.fromkeys(events))}


async def with_tools(choice):
    asked = agent(ModelSettings(temperature=0, tool_choice=choice), tools=[get_weather])
    result = await Runner.run(asked, "What is the weather in Rome?", max_turns=4)
    return {"kinds": kinds(result), "outputs": [item.output for item in result.new_items if hasattr(item, "output")]}


async def handed_off():
    asked = agent(ModelSettings(tool_choice="transfer_to_other"), handoffs=[Agent(name="other", model="demo")])
    result = await Runner.run(asked, QUESTION)
    return {"kinds": kinds(result), "last": result.last_agent.name}


async def main():
    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", max_retries=0))
    first = await Runner.run(agent(), QUESTION)
    structured = await Runner.run(agent(ModelSettings(seed=1), output_type=Total), "What is 2 + 3?")
    chained = await Runner.run(agent(), "What is 2 + 3?", previous_response_id=first.last_response_id)
    session = SQLiteSession("a")
    await Runner.run(agent(), QUESTION, session=session)
    flat = await Runner.run(agent(), "What is 2 + 3?", session=session)
    found = {
        "whole": first.final_output,
        "streamed": await streamed(),
        "auto": await with_tools(None),
        "required": await with_tools("required"),
        "named": await with_tools("get_weather"),
        "total": structured.final_output.total,
        "chained": [chained.final_output, chained.raw_responses[0].usage.input_tokens],
        "flat": [flat.final_output, flat.raw_responses[0].usage.input_tokens],
        "handed_off": await handed_off(),
    }
    print(json.dumps(found))


asyncio.run(main())

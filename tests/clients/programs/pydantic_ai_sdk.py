"""pydantic-ai against a server, by chat completions and by responses: what its agents come to."""

import sys

from calls import call, run
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="unused")
MODELS = {kind.__name__: kind("demo", provider=provider) for kind in (OpenAIChatModel, OpenAIResponsesModel)}
GREEDY = {"temperature": 0}
WHAT = "What is aserve?"
GRACE = "Write JSON: name Grace, age 42."
OSLO = "What is the weather in Oslo?"


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=8)
    age: int


class Degrees(BaseModel):
    """How warm it is."""

    degrees: int = Field(ge=-60, le=60)


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return '{"sky": "sunny", "temperature": 21}'


def agent(model, **fields):
    return Agent(MODELS[model], model_settings=GREEDY, retries=0, **fields)


def parts(result):
    return [part.part_kind for message in result.all_messages() for part in message.parts]


async def of_each(ask):
    """What `ask(model's name)` gives for each model, or what it raises there."""
    found = {}
    for name in MODELS:
        try:
            found[name] = await ask(name)
        except Exception as error:
            found[name] = {"raised": type(error).__name__, "message": f"{error} {error.__cause__}"[:800]}
    return found


@call
async def text():
    async def ask(name):
        whole = await agent(name).run(WHAT)
        async with agent(name).run_stream(WHAT) as result:
            deltas = [delta async for delta in result.stream_text(delta=True)]
        return [whole.output, "".join(deltas)]

    return await of_each(ask)


@call
def blocking():
    return {name: agent(name).run_sync(WHAT).output for name in MODELS}


@call
async def tool():
    async def ask(name):
        whole = await agent(name, tools=[get_weather]).run(OSLO)
        async with agent(name, tools=[get_weather]).run_stream(OSLO) as result:
            streamed = await result.get_output()
        return {"parts": parts(whole), "answer": whole.output, "streamed": streamed}

    return await of_each(ask)


async def output(kind):
    async def ask(name):
        whole = await agent(name, output_type=kind).run(GRACE)
        async with agent(name, output_type=kind).run_stream(GRACE) as result:
            last = [part async for part in result.stream_output()][-1]
        return [whole.output.model_dump(), last.model_dump(), parts(whole)]

    return await of_each(ask)


@call
async def output_by_tool():
    return await output(ToolOutput(Person))


@call
async def output_natively():
    return await output(NativeOutput(Person, strict=True))


@call
async def output_by_prompt():
    return await output(PromptedOutput(Person))


@call
async def output_beside_a_tool():
    """A type of its own does not keep the model from calling."""

    async def ask(name):
        typed = NativeOutput(Degrees, strict=True)
        return parts(await agent(name, output_type=typed, tools=[get_weather]).run(OSLO))

    return await of_each(ask)


@call
async def conversation():
    async def ask(name):
        first = await agent(name).run("My name is Grace.")
        second = await agent(name).run("What is my name?", message_history=first.all_messages())
        return second.output

    return await of_each(ask)


run()

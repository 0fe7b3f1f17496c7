"""instructor against a server, in each of its modes that OpenAI's API has: what comes of a type that is asked for."""

import sys
from collections.abc import Iterable

import instructor
import openai
from calls import call, run
from instructor import Mode
from pydantic import BaseModel, Field

WHERE = {"base_url": f"{sys.argv[1]}/v1", "api_key": "unused", "max_retries": 0}
GREEDY = {"model": "demo", "temperature": 0, "max_retries": 0}
GRACE = [{"role": "user", "content": "Write JSON: name Grace, age 42."}]


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=8)
    age: int


class Weather(BaseModel):
    """Get the weather of a city."""

    city: str = Field(max_length=8)


def client(mode):
    return instructor.from_openai(openai.OpenAI(**WHERE), mode=mode)


def created(mode, **fields):
    """Whole, and as a stream's last part has it."""
    asked = {"messages": GRACE, "response_model": Person, **GREEDY, **fields}
    whole = client(mode).create(**asked)
    parts = list(client(mode).create_partial(**asked))
    return [whole.model_dump(), parts[-1].model_dump(), len(parts) > 1]


@call
def tools():
    return created(Mode.TOOLS)


@call
def tools_strict():
    return created(Mode.TOOLS_STRICT)


@call
def json_schema():
    return created(Mode.JSON_SCHEMA)


@call
def json():
    return created(Mode.JSON)


@call
def md_json():
    text = '```json\\n\\{"name": "[A-Z][a-z]{1,7}", "age": [0-9]{2}\\}\\n```'
    return created(Mode.MD_JSON, extra_body={"structured_outputs": {"regex": text}})


@call
def responses_tools():
    return client(Mode.RESPONSES_TOOLS).create(messages=GRACE, response_model=Person, **GREEDY).model_dump()


@call
def responses_tools_beside_built_in_ones():
    """Of which none is given."""
    mode = Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS
    return client(mode).create(messages=GRACE, response_model=Person, **GREEDY).model_dump()


@call
def functions():
    return client(Mode.FUNCTIONS).create(messages=GRACE, response_model=Person, **GREEDY).model_dump()


@call
def json_o1():
    return client(Mode.JSON_O1).create(messages=GRACE, response_model=Person, **GREEDY).model_dump()


@call
def parallel_tools():
    question = [{"role": "user", "content": "What is the weather in Oslo?"}]
    asked = {"messages": question, "response_model": Iterable[Weather], **GREEDY}
    forced = {"extra_body": {"tool_choice": "required"}}  # instructor leaves it to the model
    return [made.model_dump() for made in client(Mode.PARALLEL_TOOLS).create(**asked, **forced)]


@call
def iterable():
    """A list of them, one by one as they come."""
    asked = {"messages": GRACE, "response_model": Person, "max_tokens": 120, **GREEDY}
    return next(iter(client(Mode.JSON_SCHEMA).create_iterable(**asked))).model_dump()


@call
async def tools_that_wait():
    waiting = instructor.from_openai(openai.AsyncOpenAI(**WHERE), mode=Mode.TOOLS)
    return (await waiting.create(messages=GRACE, response_model=Person, **GREEDY)).model_dump()


@call
def raw():
    person, answer = client(Mode.TOOLS).create_with_completion(messages=GRACE, response_model=Person, **GREEDY)
    return [person.model_dump(), answer.choices[0].finish_reason]


run()

"""langchain-openai against two servers: what its models and embeddings make of each answer."""

import asyncio
import json
import sys

from calls import call, run
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

WHERE = {"base_url": f"{sys.argv[1]}/v1", "api_key": "unused", "max_retries": 0}
GREEDY = {"model": "demo", "temperature": 0, **WHERE}
WHAT = "What is aserve?"
GRACE = "Write JSON: name Grace, age 42."
OSLO = "What is the weather in Oslo?"
RESULT = '{"sky": "sunny", "temperature": 21}'

model = ChatOpenAI(**GREEDY, stream_usage=True)
responding = ChatOpenAI(**GREEDY, use_responses_api=True)


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=8, description="A first name")
    age: int


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return RESULT


def together(chunks):
    chunks = list(chunks)
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    return whole


def told(message):
    calls = [[made["name"], made["args"]] for made in message.tool_calls]
    return {"text": message.text, "calls": calls, "usage": message.usage_metadata["output_tokens"]}


def whole_and_streamed(model, asked):
    return [told(model.invoke(asked)), told(together(model.stream(asked)))]


@call
def chat():
    return whole_and_streamed(model, WHAT)


@call
async def chat_that_waits():
    parts = [part.text async for part in model.astream(WHAT)]
    answers = await model.abatch([WHAT, WHAT])
    return ["".join(parts), [answer.text for answer in answers], (await model.ainvoke(WHAT)).text]


@call
def completion():
    text = OpenAI(**GREEDY, max_tokens=8)
    return [text.invoke("Once upon a time"), "".join(text.stream("Once upon a time"))]


@call
def scores():
    answer = ChatOpenAI(**GREEDY, logprobs=True, top_logprobs=2).invoke(WHAT, stop=["."])
    content = answer.response_metadata["logprobs"]["content"]
    return ["".join(score["token"] for score in content).startswith(answer.text), len(content[0]["top_logprobs"])]


def rounds(model, **options):
    """A call, its result, and the answer to that; the call whole, and as a stream comes to it."""
    bound = model.bind_tools([get_weather], **options)
    free = model.bind_tools([get_weather])
    found = []
    for first in (bound.invoke(OSLO), together(bound.stream(OSLO))):
        [made] = first.tool_calls
        result = get_weather.invoke(made)
        answer = free.invoke([HumanMessage(OSLO), first, result])
        found.append({"calls": [[made["name"], made["args"]]], "answer": answer.text})
    return found


@call
def tools():
    return rounds(model)


@call
def tools_strict():
    return rounds(model, strict=True)


@call
def tools_forced():
    return [
        told(model.bind_tools([get_weather], tool_choice=choice).invoke(OSLO))["calls"]
        for choice in ("required", "any", "get_weather", True)
    ]


@call
def tools_one_at_a_time():
    return rounds(model, parallel_tool_calls=False)


@call
def tools_told_by_hand():
    """A history that another program wrote."""
    made = {"name": "get_weather", "args": {"city": "Oslo"}, "id": "call_1", "type": "tool_call"}
    history = [HumanMessage(OSLO), AIMessage("", tool_calls=[made]), ToolMessage(RESULT, tool_call_id="call_1")]
    return model.bind_tools([get_weather]).invoke(history).text


def structured(model, kind, method):
    options = {} if method == "json_mode" else {"strict": True}
    asking = model.with_structured_output(kind, method=method, include_raw=True, **options)
    answer = asking.invoke(GRACE)
    if answer["parsing_error"] is not None:
        raise answer["parsing_error"]
    parsed = answer["parsed"]
    return parsed if isinstance(parsed, dict) else parsed.model_dump()


@call
def by_json_schema():
    return [structured(model, kind, "json_schema") for kind in (Person, Person.model_json_schema())]


@call
def by_function_calling():
    return [structured(model, kind, "function_calling") for kind in (Person, Person.model_json_schema())]


@call
def by_json_mode():
    return [structured(model, kind, "json_mode") for kind in (Person, Person.model_json_schema())]


@call
def by_json_schema_streamed():
    return list(model.with_structured_output(Person, method="json_schema").stream(GRACE))[-1].model_dump()


@call
def responses():
    return whole_and_streamed(responding, WHAT)


@call
def responses_with_tools():
    return rounds(responding)


@call
def responses_structured():
    return [structured(responding, Person, method) for method in ("json_schema", "function_calling")]


@call
def responses_continued():
    """By the id of the last one, which the model takes out of the history by itself."""
    chained = ChatOpenAI(**GREEDY, use_responses_api=True, use_previous_response_id=True)
    first = chained.invoke("My name is Grace.")
    history = [HumanMessage("My name is Grace."), first, HumanMessage("What is my name?")]
    by_id, by_items = chained.invoke(history), responding.invoke(history)
    return [[each.text, each.usage_metadata["input_tokens"]] for each in (by_id, by_items)]


def embeddings_of(**options):
    where = {**WHERE, "base_url": f"{sys.argv[2]}/v1"}
    return OpenAIEmbeddings(model="demo", check_embedding_ctx_length=False, **where, **options)


@call
def embeddings():
    texts = ["a fox", "a story"]
    vectors = embeddings_of().embed_documents(texts)
    query = embeddings_of().embed_query("a fox")
    later = asyncio.run(embeddings_of().aembed_documents(texts))
    apart = max(abs(x - y) for x, y in zip(vectors[0], query, strict=True))
    return {"lengths": [len(vector) for vector in vectors], "apart": apart, "same": later == vectors}


@call
def image():
    part = {"type": "image", "url": "http://a/b.png"}
    json.dumps(model.invoke([HumanMessage([part])]).text)


run()

"""litellm against two servers, by its providers openai/, hosted_vllm/, text-completion-openai/ and anthropic/."""

import asyncio
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # the prices that it came with, and no look-up of newer ones

import litellm
from calls import call, run
from pydantic import BaseModel

litellm.suppress_debug_info = True
litellm.num_retries = 0

PROVIDERS = {
    "openai": {"model": "openai/demo", "api_base": f"{sys.argv[1]}/v1"},
    "hosted_vllm": {"model": "hosted_vllm/demo", "api_base": f"{sys.argv[1]}/v1"},
    "anthropic": {"model": "anthropic/demo", "api_base": sys.argv[1], "max_tokens": 64},
}
SHARED = {"api_key": "unused", "temperature": 0}
RESULT = '{"sky": "sunny", "temperature": 21}'
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Person(BaseModel):
    name: str
    age: int


def user(text):
    return [{"role": "user", "content": text}]


WHAT = user("What is aserve?")
GRACE = user("Write JSON: name Grace, age 42.")
OSLO = user("What is the weather in Oslo?")


def told(answer):
    [choice] = answer.choices
    calls = [[made.function.name, json.loads(made.function.arguments)] for made in choice.message.tool_calls or ()]
    return {"text": choice.message.content or "", "calls": calls, "reason": choice.finish_reason}


def each(ask):
    """What `ask(fields)` gives for each provider, or what it raises there."""
    found = {}
    for name, fields in PROVIDERS.items():
        try:
            found[name] = ask({**SHARED, **fields})
        except Exception as error:
            found[name] = {"raised": type(error).__name__, "message": str(error)[:800]}
    return found


def streamed(fields, **more):
    chunks = list(litellm.completion(**fields, **more, stream=True, stream_options={"include_usage": True}))
    return litellm.stream_chunk_builder(chunks)


@call
def chat():
    return each(lambda fields: told(litellm.completion(messages=WHAT, **fields)))


@call
def chat_streamed():
    def ask(fields):
        answer = streamed(fields, messages=WHAT)
        return {**told(answer), "tokens": answer.usage.completion_tokens}

    return each(ask)


@call
def chat_that_waits():
    return each(lambda fields: told(asyncio.run(litellm.acompletion(messages=WHAT, **fields))))


@call
def tools():
    """A call, its result and the answer to that: whole, and as a stream comes to it."""

    def ask(fields):
        found = []
        for first in (
            litellm.completion(messages=OSLO, tools=[WEATHER], **fields),
            streamed(fields, messages=OSLO, tools=[WEATHER]),
        ):
            message = first.choices[0].message
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": RESULT}
            history = [*OSLO, message, result]
            found.append([told(first), told(litellm.completion(messages=history, tools=[WEATHER], **fields))])
        return found

    return each(ask)


@call
def tools_forced():
    named = {"type": "function", "function": {"name": "get_weather"}}

    def ask(fields):
        return [
            told(litellm.completion(messages=OSLO, tools=[WEATHER], tool_choice=choice, **fields))["calls"]
            for choice in ("required", named)
        ]

    return each(ask)


@call
def structured():
    """By a pydantic model, and whole and streamed."""

    def ask(fields):
        answers = (
            litellm.completion(messages=GRACE, response_format=Person, **fields),
            streamed(fields, messages=GRACE, response_format=Person),
        )
        return [json.loads(told(answer)["text"]) for answer in answers]

    return each(ask)


@call
def json_object():
    def ask(fields):
        answer = litellm.completion(messages=GRACE, response_format={"type": "json_object"}, **fields)
        return json.loads(told(answer)["text"])

    return each(ask)


@call
def reasoning_effort():
    def ask(fields):
        return told(litellm.completion(messages=WHAT, reasoning_effort="low", **{**fields, "max_tokens": 1100}))["text"]

    answers = each(ask)
    del answers["anthropic"]  # litellm does not know that such a model takes it
    return answers


@call
def completion():
    answer = litellm.text_completion(
        model="text-completion-openai/demo",
        api_base=f"{sys.argv[1]}/v1",
        prompt="Once upon a time",
        max_tokens=8,
        **SHARED,
    )
    return answer.choices[0].text


@call
def responses():
    fields = {**SHARED, **PROVIDERS["openai"]}
    whole = litellm.responses(input="What is aserve?", **fields)
    events = list(litellm.responses(input="What is aserve?", stream=True, **fields))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    return [whole.output[0].content[0].text, "".join(deltas)]


@call
def messages():
    """Anthropic's own words, to both faces."""

    async def ask(name):
        fields = {**SHARED, **PROVIDERS[name], "max_tokens": 64}
        answer = await litellm.anthropic_messages(messages=WHAT, **fields)
        return answer["content"][0]["text"]

    return {name: asyncio.run(ask(name)) for name in ("openai", "hosted_vllm", "anthropic")}


@call
def embeddings():
    found = {}
    for name in ("openai", "hosted_vllm"):
        answer = litellm.embedding(
            model=f"{name}/demo", api_base=f"{sys.argv[2]}/v1", api_key="unused", input=["a fox", "a story"]
        )
        found[name] = [[len(vector["embedding"]) for vector in answer.data], answer.usage.prompt_tokens]
    return found


@call
def rerank():
    answer = litellm.rerank(
        model="hosted_vllm/demo",
        api_base=sys.argv[2],
        api_key="unused",
        query="a fox",
        documents=["a fox", "a story"],
        top_n=1,
    )
    return [[each["index"], each["relevance_score"] > 0.99] for each in answer.results]


@call
def errors():
    return each(lambda fields: told(litellm.completion(**{**fields, "messages": WHAT, "temperature": 9})))


run()

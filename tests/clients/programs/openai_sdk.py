"""OpenAI's SDK against two servers: what it makes of each answer of a model that writes, and of one that embeds."""

import asyncio
import enum
import io
import json
import sys
import time

import openai
from calls import call, run
from pydantic import BaseModel, Field

OPTIONS = {"api_key": "unused", "max_retries": 0}
client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", **OPTIONS)
eventually = openai.AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", **OPTIONS)
embedder = openai.OpenAI(base_url=f"{sys.argv[2]}/v1", **OPTIONS)
GREEDY = {"model": "demo", "temperature": 0}


def user(text):
    return [{"role": "user", "content": text}]


WHAT = user("What is aserve?")
GRACE = user("Write JSON: name Grace, age 42.")
OSLO = user("What is the weather in Oslo?")


class Person(BaseModel):
    name: str
    age: int


class GetWeather(BaseModel):
    """Get the weather of a city."""

    city: str


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Part(BaseModel):
    """A part of something."""

    label: str = Field(max_length=6)
    weight: float | None = Field(description="In kilograms")


class Whole(BaseModel):
    colour: Colour
    first: Part = Field(description="What it begins with")
    others: list[Part] = Field(max_length=2)
    note: str | None = Field(default=None, max_length=6)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
FLAT_WEATHER = {"type": "function", **WEATHER["function"]}
RESULT = '{"sky": "sunny", "temperature": 21}'


def told(answer):
    """Without what differs from one request to the next."""
    [choice] = answer.choices
    message = choice.message
    calls = [[each.function.name, each.function.arguments] for each in message.tool_calls or ()]
    parsed = getattr(message, "parsed", None)
    return {
        "content": message.content,
        "calls": calls,
        "reason": choice.finish_reason,
        "parsed": None if parsed is None else parsed.model_dump(mode="json"),
        "usage": [answer.usage.prompt_tokens, answer.usage.completion_tokens],
    }


def streamed(**fields):
    options = {"stream_options": {"include_usage": True}}
    with client.chat.completions.stream(**GREEDY, **options, **fields) as stream:
        kinds = [event.type for event in stream]
        return {**told(stream.get_final_completion()), "kinds": list(dict.fromkeys(kinds))}


@call
def chat():
    return told(client.chat.completions.create(messages=WHAT, **GREEDY))


@call
def chat_streamed():
    return streamed(messages=WHAT)


@call
def chat_chunks():
    """Without the helper, with log-probabilities and their tokens."""

    def scores(found):
        return [score.to_dict() for choice in found if choice.logprobs for score in choice.logprobs.content]

    fields = {**GREEDY, "messages": WHAT, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**fields)
    chunks = client.chat.completions.create(**fields, stream=True)
    together = scores(chunk.choices[0] for chunk in chunks)
    tokens = [score["token"] for score in scores(whole.choices)]
    return {"equal": together == scores(whole.choices), "text": "".join(tokens), "num": len(tokens)}


@call
def choices():
    answer = client.chat.completions.create(model="demo", messages=WHAT, n=3, seed=5, temperature=1, max_tokens=8)
    return [[choice.index, choice.finish_reason] for choice in answer.choices]


@call
def raw():
    answer = client.chat.completions.with_raw_response.create(messages=WHAT, max_tokens=1, **GREEDY)
    return {"named": bool(answer.headers["x-request-id"]), "id": answer.parse().id == f"chatcmpl-{answer.request_id}"}


@call
def parse():
    return told(client.chat.completions.parse(messages=GRACE, response_format=Person, **GREEDY))


@call
def parse_streamed():
    return streamed(messages=GRACE, response_format=Person)


@call
def parse_nested():
    return told(client.chat.completions.parse(messages=GRACE, response_format=Whole, **GREEDY))


@call
def parsed_goes_back():
    """As the SDK's parser has it, and as the text that it is."""
    message = client.chat.completions.parse(messages=GRACE, response_format=Person, **GREEDY).choices[0].message
    histories = (
        [*GRACE, earlier, *user("What is my name?")]
        for earlier in (message, {"role": "assistant", "content": message.content})
    )
    return [told(client.chat.completions.create(messages=history, **GREEDY)) for history in histories]


@call
def json_object():
    return told(client.chat.completions.create(messages=GRACE, response_format={"type": "json_object"}, **GREEDY))


@call
def tools():
    return told(client.chat.completions.create(messages=OSLO, tools=[WEATHER], **GREEDY))


@call
def tools_streamed():
    return streamed(messages=OSLO, tools=[WEATHER])


@call
def tools_parsed():
    """By a type, from the SDK's strict schema, which the demo model has never seen: hence forced."""
    asked = {"messages": OSLO, "tools": [openai.pydantic_function_tool(GetWeather)], "tool_choice": "required"}
    whole = client.chat.completions.parse(**asked, **GREEDY)
    with client.chat.completions.stream(**asked, **GREEDY) as stream:
        together = stream.get_final_completion()
    found = []
    for answer in (whole, together):
        [made] = answer.choices[0].message.tool_calls
        arguments = made.function.parsed_arguments
        found.append([type(arguments).__name__, list(arguments.model_dump())])
    return found


@call
def tools_round():
    """The SDK's own message object goes back, whole and as the stream helper has it."""
    first = client.chat.completions.create(messages=OSLO, tools=[WEATHER], **GREEDY).choices[0].message
    with client.chat.completions.stream(messages=OSLO, tools=[WEATHER], **GREEDY) as stream:
        again = stream.get_final_completion().choices[0].message
    found = []
    for message in (first, again):
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": RESULT}
        messages = [*OSLO, message, result]
        found.append(told(client.chat.completions.create(messages=messages, tools=[WEATHER], **GREEDY)))
        found.append({**streamed(messages=messages, tools=[WEATHER]), "kinds": None})
    return found


@call
def tools_or_a_type():
    """A call first, and a type once there is its result."""
    schema = {"type": "object", "properties": {"degrees": {"type": "integer"}}, "required": ["degrees"]}
    closed = {**schema, "additionalProperties": False}
    typed = {"type": "json_schema", "json_schema": {"name": "degrees", "strict": True, "schema": closed}}
    asked = {"tools": [WEATHER], "response_format": typed, **GREEDY}
    message = client.chat.completions.create(messages=OSLO, **asked).choices[0].message
    [made] = message.tool_calls
    result = {"role": "tool", "tool_call_id": made.id, "content": RESULT}
    answer = client.chat.completions.create(messages=[*OSLO, message, result], **asked).choices[0].message
    return [json.loads(made.function.arguments), list(json.loads(answer.content))]


@call
def tool_choices():
    named = {"type": "function", "function": {"name": "get_weather"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    return {
        name: told(client.chat.completions.create(messages=WHAT, tools=[WEATHER], tool_choice=choice, **GREEDY))
        for name, choice in {"required": "required", "named": named, "allowed": allowed, "none": "none"}.items()
    }


@call
def run_on():
    """The answer is cut: the SDK raises where it would have parsed."""
    client.chat.completions.parse(messages=GRACE, response_format=Person, max_tokens=3, **GREEDY)


@call
def completion():
    answer = client.completions.create(prompt="Once upon a time", max_tokens=8, logprobs=1, **GREEDY)
    chunks = client.completions.create(prompt="Once upon a time", max_tokens=8, stream=True, **GREEDY)
    return [answer.choices[0].text, "".join(chunk.choices[0].text for chunk in chunks)]


@call
def suffix():
    client.completions.create(prompt="Once", suffix="end", **GREEDY)


@call
def image():
    part = {"type": "image_url", "image_url": {"url": "http://a/b.png"}}
    client.chat.completions.create(messages=[{"role": "user", "content": [part]}], **GREEDY)


@call
def unknown_model():
    client.chat.completions.create(model="other", messages=WHAT)


@call
def models():
    return [model.id for model in client.models.list()] + [client.models.retrieve("demo").id]


@call
def effort():
    return [
        told(client.chat.completions.create(messages=WHAT, reasoning_effort=word, **GREEDY))["content"]
        for word in ("none", "high")
    ]


@call
def verbosity():
    return told(client.chat.completions.create(messages=WHAT, verbosity="low", **GREEDY))["content"]


def items(response):
    return [item.type for item in response.output]


@call
def respond():
    response = client.responses.create(input="What is aserve?", **GREEDY)
    again = client.responses.retrieve(response.id)
    listed = [item.content[0].text for item in client.responses.input_items.list(response.id)]
    client.responses.delete(response.id)
    try:
        client.responses.retrieve(response.id)
    except openai.NotFoundError as error:
        gone = error.code
    return {"text": response.output_text, "same": again.to_dict() == response.to_dict(), "asked": listed, "gone": gone}


@call
def respond_streamed():
    with client.responses.stream(input="What is aserve?", **GREEDY) as stream:
        kinds = [event.type for event in stream]
        text = stream.get_final_response().output_text
    deltas = [
        event.delta
        for event in client.responses.create(input="What is aserve?", stream=True, **GREEDY)
        if event.type == "response.output_text.delta"
    ]
    return {"text": text, "deltas": "".join(deltas), "kinds": list(dict.fromkeys(kinds))}


@call
def respond_further():
    """By the id of what came before it, and by its items: the same prompt."""
    first = client.responses.create(input="My name is Grace.", **GREEDY)
    by_id = client.responses.create(input="What is my name?", previous_response_id=first.id, **GREEDY)
    history = [*user("My name is Grace."), *first.output, *user("What is my name?")]
    by_items = client.responses.create(input=history, **GREEDY)
    return [[each.output_text, each.usage.input_tokens] for each in (by_id, by_items)]


@call
def respond_parsed():
    response = client.responses.parse(input=GRACE, text_format=Person, **GREEDY)
    with client.responses.stream(input=GRACE, text_format=Person, **GREEDY) as stream:
        together = stream.get_final_response()
    return [each.output_parsed.model_dump() for each in (response, together)]


@call
def respond_with_tools():
    fields = {"tools": [FLAT_WEATHER], **GREEDY}
    first = client.responses.create(input=OSLO, **fields)
    [made] = first.output
    result = {"type": "function_call_output", "call_id": made.call_id, "output": RESULT}
    with client.responses.stream(input=OSLO, **fields) as stream:
        kinds = [event.type for event in stream]
        together = stream.get_final_response()
    by_id = client.responses.create(input=[result], previous_response_id=first.id, **fields)
    by_items = client.responses.create(input=[*OSLO, *first.output, result], **fields)
    return {
        "call": [made.name, json.loads(made.arguments)],
        "together": [items(together), together.output[0].arguments == made.arguments],
        "kinds": list(dict.fromkeys(kinds)),
        "answers": [by_id.output_text, by_items.output_text],
    }


@call
def respond_in_background():
    made = client.responses.create(input="What is aserve?", background=True, **GREEDY)
    begun = made.status
    deadline = time.monotonic() + 30
    while made.status in ("queued", "in_progress") and time.monotonic() < deadline:
        time.sleep(0.05)
        made = client.responses.retrieve(made.id)
    return [begun, made.status, made.output_text]


@call
def respond_with_scores():
    include = ["message.output_text.logprobs"]
    response = client.responses.create(input="What is aserve?", include=include, top_logprobs=2, **GREEDY)
    scores = response.output[0].content[0].logprobs
    return ["".join(score.token for score in scores).startswith(response.output_text), len(scores[0].top_logprobs)]


@call
def respond_with_a_search():
    client.responses.create(input="What is aserve?", tools=[{"type": "web_search"}], **GREEDY)


@call
def count_input():
    return client.responses.input_tokens.count(input="What is aserve?", model="demo").input_tokens


@call
def embeddings():
    texts = ["a fox", "a story"]
    as_numbers = embedder.embeddings.create(model="demo", input=texts, encoding_format="float")
    as_bytes = embedder.embeddings.create(model="demo", input=texts)
    one = embedder.embeddings.create(model="demo", input=[5, 6, 7])
    pairs = zip(as_numbers.data, as_bytes.data, strict=True)
    apart = [abs(x - y) for ours, theirs in pairs for x, y in zip(ours.embedding, theirs.embedding, strict=True)]
    vector = as_numbers.data[0].embedding
    return {
        "num": len(vector),
        "norm": sum(number * number for number in vector),
        "apart": max(apart),
        "tokens": one.usage.prompt_tokens,
        "order": [each.index for each in as_numbers.data],
    }


@call
def embeddings_cut():
    embedder.embeddings.create(model="demo", input="a fox", dimensions=8)


@call
def embeddings_of_a_writer():
    client.embeddings.create(model="demo", input="a fox")


def batched(lines):
    body = "\n".join(json.dumps(line) for line in lines).encode()
    return client.files.create(file=("in.jsonl", io.BytesIO(body)), purpose="batch")


def line(name, question, **fields):
    body = {"messages": user(question), **GREEDY, **fields}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


@call
def batch():
    file = batched([line("a", "What is aserve?"), line("b", "What is 2 + 3?"), line("c", "x", temperature=9)])
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    deadline = time.monotonic() + 60
    while made.status not in ("completed", "failed") and time.monotonic() < deadline:
        time.sleep(0.05)
        made = client.batches.retrieve(made.id)
    answers = [json.loads(each) for each in client.files.content(made.output_file_id).text.splitlines()]
    errors = [json.loads(each) for each in client.files.content(made.error_file_id).text.splitlines()]
    listed = [each.id for each in client.batches.list(limit=10)]
    texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"] for each in answers}
    return {
        "status": made.status,
        "counts": made.request_counts.to_dict(),
        "texts": texts,
        "errors": [[each["custom_id"], each["response"]["status_code"]] for each in errors],
        "listed": made.id in listed,
    }


@call
def batch_of_bad_lines():
    file = batched([{"custom_id": "a"}])
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    deadline = time.monotonic() + 30
    while made.status not in ("completed", "failed") and time.monotonic() < deadline:
        time.sleep(0.05)
        made = client.batches.retrieve(made.id)
    return [made.status, made.errors.data[0].line]


@call
def files():
    body = json.dumps(line("a", "x")).encode()
    made = client.files.create(file=("in.jsonl", body), purpose="batch")
    listed = [each.id for each in client.files.list()]
    same = client.files.content(made.id).read() == body
    gone = client.files.delete(made.id).deleted
    return {"size": made.bytes == len(body), "listed": made.id in listed, "same": same, "gone": gone}


@call
async def many_at_once():
    """A third of them is cancelled on the way; the others say what one alone says."""

    async def ask(cancels):
        stream = await eventually.chat.completions.create(messages=WHAT, stream=True, **GREEDY)
        parts = []
        async for chunk in stream:
            parts.append(chunk.choices[0].delta.content or "")
            if cancels and len(parts) > 2:
                await stream.close()
                return None
        return "".join(parts)

    found = await asyncio.gather(*(ask(index % 3 == 0) for index in range(48)))
    alone = (await eventually.chat.completions.create(messages=WHAT, **GREEDY)).choices[0].message.content
    return [found.count(None), found.count(alone)]


@call
async def helpers_that_wait():
    async with eventually.chat.completions.stream(messages=GRACE, response_format=Person, **GREEDY) as stream:
        chat = (await stream.get_final_completion()).choices[0].message.parsed
    async with eventually.responses.stream(input=GRACE, text_format=Person, **GREEDY) as stream:
        response = (await stream.get_final_response()).output_parsed
    parsed = await eventually.chat.completions.parse(messages=GRACE, response_format=Person, **GREEDY)
    return [each.model_dump() for each in (chat, response, parsed.choices[0].message.parsed)]


run()

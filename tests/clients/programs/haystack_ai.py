"""Haystack's generators, embedders and agent against servers: what each call gives back, as JSON."""

import sys

from calls import call, run
from haystack import Document, Pipeline
from haystack.components.agents import Agent
from haystack.components.builders import ChatPromptBuilder
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import LLM, OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from pydantic import BaseModel, Field

URL, URL_POOLING = (f"{url}/v1" for url in sys.argv[1:])
QUESTION = "What is aserve?"
WEATHER = [ChatMessage.from_user("What is the weather in Rome?")]
ASKED = [ChatMessage.from_user(QUESTION)]
KEY = Secret.from_token("unused")
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"It rains in {city[:8]}."


class Total(BaseModel):
    """What an answer has to be."""

    total: int = Field(ge=0, le=99)


TOOL = create_tool_from_function(get_weather)


def generator(kind=OpenAIChatGenerator, **sampling):
    return kind(
        api_key=KEY, model="demo", api_base_url=URL, max_retries=0, generation_kwargs={"temperature": 0, **sampling}
    )


def answer(**fields):
    [reply] = generator().run(ASKED, **fields)["replies"]
    return reply


@call
def chat():
    reply = answer()
    return {"text": reply.text, "finish_reason": reply.meta["finish_reason"], "usage": reply.meta["usage"]}


@call
def chat_streamed():
    parts = []
    reply = answer(streaming_callback=lambda chunk: parts.append(chunk.content))
    return {"text": reply.text, "parts": "".join(parts), "finish_reason": reply.meta["finish_reason"]}


@call
async def chat_async():
    [reply] = (await generator().run_async(ASKED))["replies"]
    return reply.text


@call
def choices():
    return [reply.text for reply in generator(n=2).run(ASKED)["replies"]]


@call
def prompt():
    """LLM, which is what haystack 3 has in place of OpenAIGenerator."""
    return LLM(chat_generator=generator(), user_prompt="What is {{topic}}?").run(topic="aserve")["last_message"].text


@call
def responses():
    [reply] = generator(OpenAIResponsesChatGenerator).run(ASKED)["replies"]
    return reply.text


@call
def responses_streamed():
    parts = []
    made = generator(OpenAIResponsesChatGenerator)
    [reply] = made.run(ASKED, streaming_callback=lambda chunk: parts.append(chunk.content))["replies"]
    return {"text": reply.text, "parts": "".join(parts)}


def called(reply):
    return [[found.tool_name, found.arguments] for found in reply.tool_calls]


@call
def auto_call():
    return called(generator().run(WEATHER, tools=[TOOL])["replies"][0])


@call
def required_call():
    return called(generator(tool_choice="required").run(WEATHER, tools=[TOOL])["replies"][0])


@call
def strict_call():
    return called(generator(tool_choice=NAMED).run(WEATHER, tools=[TOOL], tools_strict=True)["replies"][0])


@call
def streamed_call():
    made = generator(tool_choice="required")
    return called(made.run(WEATHER, tools=[TOOL], streaming_callback=lambda chunk: None)["replies"][0])


@call
def responses_call():
    made = generator(OpenAIResponsesChatGenerator, tool_choice="required")
    return called(made.run(WEATHER, tools=[TOOL])["replies"][0])


@call
def result_of_a_call():
    """The call and what its tool gave, as messages of the next request."""
    [reply] = generator().run(WEATHER, tools=[TOOL])["replies"]
    result = ChatMessage.from_tool(get_weather(**reply.tool_calls[0].arguments), origin=reply.tool_calls[0])
    [last] = generator().run([*WEATHER, reply, result], tools=[TOOL])["replies"]
    return {"calls": len(last.tool_calls), "text": last.text}


@call
def agent():
    made = Agent(chat_generator=generator(), tools=[TOOL], max_agent_steps=3)
    found = made.run(WEATHER)["messages"]
    return {"roles": [message.role.value for message in found], "text": found[-1].text}


@call
def typed():
    made = generator(response_format=Total)
    return made.run([ChatMessage.from_user("What is 2 + 3?")])["replies"][0].text


@call
def pipeline():
    made = Pipeline()
    made.add_component("prompt", ChatPromptBuilder([ChatMessage.from_user("What is {{topic}}?")]))
    made.add_component("model", generator())
    made.connect("prompt.prompt", "model.messages")
    return made.run({"prompt": {"topic": "aserve"}})["model"]["replies"][0].text


@call
def text_embedder():
    made = OpenAITextEmbedder(api_key=KEY, model="demo", api_base_url=URL_POOLING)
    return made.run("a fox")["embedding"]


@call
def document_embedder():
    made = OpenAIDocumentEmbedder(api_key=KEY, model="demo", api_base_url=URL_POOLING, batch_size=2, progress_bar=False)
    found = made.run([Document(content=text) for text in ("a fox", "an owl", "a robot")])
    return [document.embedding for document in found["documents"]]


run()

"""LlamaIndex's OpenAILike and its embeddings against servers: what each call gives back, as JSON."""

import sys

from calls import call, run
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses
from pydantic import BaseModel, Field

URL, URL_POOLING = (f"{url}/v1" for url in sys.argv[1:])
QUESTION = "What is aserve?"
WEATHER = "What is the weather in Rome?"


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"It rains in {city[:8]}."


class Total(BaseModel):
    """What an answer has to be."""

    total: int = Field(ge=0, le=99)


def model(**fields):
    fields = {"is_chat_model": True, "is_function_calling_model": True, "max_tokens": 64, "temperature": 0} | fields
    return OpenAILike(model="demo", api_base=URL, api_key="unused", context_window=2048, max_retries=0, **fields)


LLM = model()
TYPED = model(should_use_structured_outputs=True)
TOOL = FunctionTool.from_defaults(get_weather, description="Get the weather of a city.")
ASKED = [ChatMessage(role="user", content=QUESTION)]
PROMPT = PromptTemplate("What is {a} + {b}?")


@call
def chat():
    return LLM.chat(ASKED).message.content


@call
def chat_streamed():
    return "".join(part.delta for part in LLM.stream_chat(ASKED))


@call
async def chat_async():
    return (await LLM.achat(ASKED)).message.content


@call
async def chat_async_streamed():
    return "".join([part.delta async for part in await LLM.astream_chat(ASKED)])


@call
def complete():
    return LLM.complete(QUESTION).text


@call
def text():
    """By /v1/completions."""
    return model(is_chat_model=False, max_tokens=16).complete("Once upon a time").text


@call
def text_streamed():
    return "".join(part.delta for part in model(is_chat_model=False, max_tokens=16).stream_complete("Once upon a time"))


def responses():
    return OpenAILikeResponses(
        model="demo",
        api_base=URL,
        api_key="unused",
        context_window=2048,
        is_function_calling_model=True,
        max_output_tokens=64,
        temperature=0,
        max_retries=0,
    )


@call
def responses_chat():
    return responses().chat(ASKED).message.content


@call
def responses_streamed():
    return "".join(part.delta or "" for part in responses().stream_chat(ASKED))


@call
def responses_call():
    return called(responses().chat_with_tools([TOOL], user_msg=WEATHER, tool_required=True))


@call
def responses_round():
    return str(responses().predict_and_call([TOOL], user_msg=WEATHER))


@call
def responses_typed():
    return responses().as_structured_llm(Total).complete("What is 2 + 3?").raw.model_dump()


@call
def predict_and_call():
    return str(LLM.predict_and_call([TOOL], user_msg=WEATHER))


@call
def required_call():
    return called(LLM.chat_with_tools([TOOL], user_msg=WEATHER, tool_required=True))


@call
def named_call():
    return called(LLM.chat_with_tools([TOOL], user_msg=WEATHER, tool_choice="get_weather"))


@call
def streamed_call():
    *_, last = LLM.stream_chat_with_tools([TOOL], user_msg=WEATHER, tool_required=True)
    return called(last)


def called(response):
    return [[found.tool_name, found.tool_kwargs] for found in LLM.get_tool_calls_from_response(response)]


@call
async def agent():
    """Calls by itself, and answers by the result."""
    found = await FunctionAgent(tools=[TOOL], llm=LLM, streaming=False).run(WEATHER)
    return {"outputs": [str(made.tool_output) for made in found.tool_calls], "answer": str(found)}


@call
async def agent_streamed():
    found = await FunctionAgent(tools=[TOOL], llm=LLM).run(WEATHER)
    return {"outputs": [str(made.tool_output) for made in found.tool_calls], "answer": str(found)}


@call
def typed_by_schema():
    return TYPED.structured_predict(Total, PROMPT, a=2, b=3).model_dump()


@call
def typed_by_tool():
    return LLM.structured_predict(Total, PROMPT, a=2, b=3).model_dump()


@call
def typed_streamed():
    *_, last = TYPED.stream_structured_predict(Total, PROMPT, a=2, b=3)
    return last.model_dump()


@call
def embedding():
    return OpenAILikeEmbedding(model_name="demo", api_base=URL_POOLING, api_key="unused").get_text_embedding("a fox")


@call
async def embeddings():
    embedder = OpenAILikeEmbedding(model_name="demo", api_base=URL_POOLING, api_key="unused", embed_batch_size=2)
    return await embedder.aget_text_embedding_batch(["a fox", "an owl", "a robot"])


run()

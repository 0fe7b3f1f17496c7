"""DSPy's programs through dspy.LM against servers, under each of its adapters: what each comes to, as JSON.

The demo model does not write what ChatAdapter and XMLAdapter ask for, so a regular expression makes it do so; under
JSONAdapter the schema is the one that DSPy sends to a server of which it is told that it takes one, or one of the same
fields.
"""

import sys

import dspy
import dspy.lm15
from calls import call, run

URL, URL_POOLING = (f"{url}/v1" for url in sys.argv[1:])
QUESTION = "What is 2 + 3?"
WEATHER = "What is the weather in Rome?"
TEXT = "[a-z ]{1,24}"


class Sum(dspy.Signature):
    """Add."""

    question: str = dspy.InputField()
    total: int = dspy.OutputField()


dspy.lm15.register_provider(
    dspy.lm15.ProviderDefinition.chat(
        dspy.lm15.AccessPolicy(provider="aserve", auth_modes=("bearer",), base_url=URL),
        compat=dspy.lm15.OpenAIChatCompat.preset("vllm"),
    ),
    supports=dspy.lm15.ModelSupport(function_calling=True, response_schema=True),
)
DECLARED = "aserve/demo"


def model(name="openai/demo", **fields):
    fields = {"max_tokens": 64, "temperature": 0, "num_retries": 0, "cache": False} | fields
    return dspy.LM(name, api_base=URL, api_key="unused", **fields)


def marked(**fields):
    """What ChatAdapter reads: a heading before each field, and one at the end."""
    parts = [rf"\[\[ ## {name} ## \]\]\n{pattern}\n\n" for name, pattern in fields.items()]
    return forced("".join(parts) + r"\[\[ ## completed ## \]\]")


def tagged(**fields):
    """What XMLAdapter reads."""
    return forced("\n".join(f"<{name}>\n{pattern}\n</{name}>" for name, pattern in fields.items()))


def forced(pattern):
    return model(max_tokens=256, extra_body={"structured_outputs": {"regex": pattern}})


def by_schema(**properties):
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    format = {"type": "json_schema", "json_schema": {"name": "fields", "schema": schema}}
    return model(max_tokens=256, extra_body={"response_format": format})


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"It rains in {city[:8]}."


@call
def plain():
    lm = model()
    return {"text": lm("What is aserve?"), "usage": lm.history[-1]["usage"]}


@call
def choices():
    return model(temperature=0.7, n=3)("Tell me a story about a fox.")


@call
def with_logprobs():
    [told] = model(logprobs=True, max_tokens=4)("What is aserve?")
    return len(told["logprobs"].content)


@call
def text():
    """By /v1/completions."""
    return model(model_type="text", max_tokens=8)("Once upon a time")


@call
def responses():
    return model(model_type="responses")("What is aserve?")


@call
async def plain_async():
    return await model().acall("What is aserve?")


@call
def predict_chat():
    with dspy.context(lm=marked(total="[0-9]{1,2}"), adapter=dspy.ChatAdapter()):
        return dspy.Predict(Sum)(question=QUESTION).total


@call
def predict_xml():
    with dspy.context(lm=tagged(total="[0-9]{1,2}"), adapter=dspy.XMLAdapter()):
        return dspy.Predict(Sum)(question=QUESTION).total


@call
def predict_json():
    """By the schema that DSPy makes of the signature."""
    with dspy.context(lm=model(DECLARED), adapter=dspy.JSONAdapter()):
        return dspy.Predict(Sum)(question=QUESTION).total


@call
def predict_chat_falls_back_on_json():
    with dspy.context(lm=model(DECLARED), adapter=dspy.ChatAdapter()):
        return dspy.Predict(Sum)(question=QUESTION).total


@call
def thought_chat():
    with dspy.context(lm=marked(reasoning=TEXT, total="[0-9]{1,2}"), adapter=dspy.ChatAdapter()):
        made = dspy.ChainOfThought(Sum)(question=QUESTION)
    return {"reasoning": made.reasoning, "total": made.total}


@call
def thought_json():
    lm = by_schema(reasoning={"type": "string", "maxLength": 24}, total={"type": "integer", "maximum": 99})
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        made = dspy.ChainOfThought(Sum)(question=QUESTION)
    return {"reasoning": made.reasoning, "total": made.total}


def react(adapter, step, extract):
    made = dspy.ReAct("question -> answer: str", tools=[get_weather], max_iters=1)
    made.react.set_lm(step)
    made.extract.set_lm(extract)
    with dspy.context(lm=model(), adapter=adapter):
        told = made(question=WEATHER)
    return {"trajectory": told.trajectory, "answer": told.answer}


@call
def react_chat():
    step = marked(next_thought=TEXT, next_tool_name="get_weather", next_tool_args=r'\{"city": "[A-Z][a-z]{1,8}"\}')
    return react(dspy.ChatAdapter(), step, marked(reasoning=TEXT, answer=TEXT))


@call
def react_json():
    string = {"type": "string", "maxLength": 24}
    arguments = {
        "type": "object",
        "properties": {"city": {"type": "string", "minLength": 1, "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    }
    step = by_schema(next_thought=string, next_tool_name={"const": "get_weather"}, next_tool_args=arguments)
    return react(dspy.JSONAdapter(), step, by_schema(reasoning=string, answer=string))


@call
def native_calls():
    """Tools as the API has them, in place of text about them."""

    class Ask(dspy.Signature):
        question: str = dspy.InputField()
        tools: list[dspy.Tool] = dspy.InputField()
        calls: dspy.ToolCalls = dspy.OutputField()

    with dspy.context(lm=model(DECLARED), adapter=dspy.ChatAdapter(use_native_function_calling=True)):
        made = dspy.Predict(Ask)(question=WEATHER, tools=[dspy.Tool(get_weather)], config={"tool_choice": "required"})
    return [[one.name, one.args] for one in made.calls.tool_calls]


@call
def embeddings():
    embed = dspy.Embedder("openai/demo", api_base=URL_POOLING, api_key="unused", caching=False)
    return [list(vector.shape) for vector in embed(["a fox", "an owl"])]


run()

"""pydantic-ai by chat completions and by responses: texts, tools, and types by all three ways, whole and streamed."""

import pytest

pytestmark = pytest.mark.clients

MODELS = ["OpenAIChatModel", "OpenAIResponsesModel"]


@pytest.fixture(scope="module")
def found(run_client):
    return run_client("pydantic_ai_sdk")


@pytest.mark.parametrize("model", MODELS)
def test_a_stream_comes_to_the_whole_answer(found, model):
    whole, streamed = found["text"][model]
    assert whole.startswith("aserve serves")
    assert streamed == whole == found["blocking"][model]


@pytest.mark.parametrize("model", MODELS)
def test_a_round_of_tools(found, model):
    told = found["tool"][model]
    assert told["parts"] == ["user-prompt", "tool-call", "tool-return", "text"]
    assert told["answer"].startswith("It is sunny in ")
    assert told["streamed"] == told["answer"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("way", "parts"),
    [
        ("output_by_tool", ["user-prompt", "tool-call", "tool-return"]),
        ("output_natively", ["user-prompt", "text"]),
        ("output_by_prompt", ["user-prompt", "text"]),
    ],
)
def test_an_answer_of_a_type(found, model, way, parts):
    whole, streamed, found_parts = found[way][model]
    assert (sorted(whole), isinstance(whole["age"], int)) == (["age", "name"], True)
    assert streamed == whole
    assert found_parts == parts


@pytest.mark.parametrize("model", MODELS)
def test_a_type_does_not_bar_a_call(found, model):
    assert found["output_beside_a_tool"][model] == ["user-prompt", "tool-call", "tool-return", "text"]


@pytest.mark.parametrize("model", MODELS)
def test_a_conversation(found, model):
    assert "Grace" in found["conversation"][model]

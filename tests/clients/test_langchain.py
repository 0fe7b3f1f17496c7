"""langchain-openai: models by chat completions and by responses, tools, types by all three methods, embeddings."""

import pytest

pytestmark = pytest.mark.clients

GRACE = {"name": "Grace", "age": 42}
OSLO = [["get_weather", {"city": "Oslo"}]]


@pytest.fixture(scope="module")
def found(run_client, embedder):
    return run_client("langchain_sdk", embedder.url)


@pytest.mark.parametrize("name", ["chat", "responses"])
def test_a_stream_comes_to_the_whole_answer(found, name):
    whole, streamed = found[name]
    assert whole["text"].startswith("aserve serves")
    assert streamed == whole
    assert whole["usage"] > 0


def test_the_ways_to_ask(found):
    text = found["chat"][0]["text"]
    assert found["chat_that_waits"] == [text, [text, text], text]
    assert found["completion"][0] == found["completion"][1] != ""
    assert found["scores"] == [True, 2]


@pytest.mark.parametrize("name", ["tools", "tools_strict", "tools_one_at_a_time", "responses_with_tools"])
def test_a_round_of_tools(found, name):
    """The model calls by itself; its message goes back as langchain writes it, whole and from a stream."""
    whole, streamed = found[name]
    assert whole["calls"] == OSLO
    assert whole["answer"].startswith("It is sunny in ")
    assert streamed == whole


def test_tools_that_have_to_be_called(found):
    assert found["tools_forced"] == [OSLO] * 4
    assert found["tools_told_by_hand"].startswith("It is sunny in ")


@pytest.mark.parametrize("name", ["by_json_schema", "by_function_calling", "by_json_mode", "responses_structured"])
def test_an_answer_of_a_type(found, name):
    """By a pydantic type and by a schema, or, of responses, by a schema and by a call."""
    for answer in found[name]:
        assert (sorted(answer), answer["name"], type(answer["age"])) == (["age", "name"], "Grace", int)


def test_a_type_that_is_streamed(found):
    assert found["by_json_schema_streamed"] == GRACE


def test_a_conversation_by_the_id_of_a_response_is_that_of_its_items(found):
    by_id, by_items = found["responses_continued"]
    assert by_id == by_items
    assert "Grace" in by_id[0]


def test_embeddings(found):
    told = found["embeddings"]
    assert told["lengths"] == [256, 256]
    assert told["apart"] < 1e-5
    assert told["same"] is True


def test_an_image_is_refused(found):
    assert found["image"]["raised"] == "OpenAIInvalidRequestError"
    assert "only text" in found["image"]["message"]

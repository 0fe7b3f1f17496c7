"""LlamaIndex by OpenAILike: chat and completions whole and streamed, tools, an agent, types by schema and by tool."""

import pytest

pytestmark = pytest.mark.clients

ROME = [["get_weather", {"city": "Rome"}]]


@pytest.fixture(scope="module")
def found(run_client, embedder):
    return run_client("llamaindex", embedder.url)


def test_every_way_to_ask_comes_to_the_same_answer(found):
    assert found["chat"].startswith("aserve serves")
    same = ("chat_streamed", "chat_async", "chat_async_streamed", "complete", "responses_chat", "responses_streamed")
    assert {found[name] for name in same} == {found["chat"]}
    assert found["text_streamed"] == found["text"] != ""


@pytest.mark.parametrize("name", ["required_call", "named_call", "streamed_call", "responses_call"])
def test_a_tool_has_to_be_called(found, name):
    assert found[name] == ROME


def test_a_tool_is_called_where_that_is_free(found):
    """An agent goes on with the result, and the model is told of it in the same way where it is streamed."""
    assert found["predict_and_call"] == found["responses_round"] == "It rains in Rome."
    assert found["agent"]["outputs"] == ["It rains in Rome."]
    assert found["agent_streamed"] == found["agent"]


def test_answers_of_a_type(found):
    """By `response_format` and by a tool that has to be called."""
    assert 0 <= found["typed_by_schema"]["total"] <= 99
    assert 0 <= found["typed_by_tool"]["total"] <= 99
    assert 0 <= found["responses_typed"]["total"] <= 99
    assert found["typed_streamed"] == found["typed_by_schema"]


def test_embeddings(found):
    """Texts in batches of two are embedded as one alone."""
    vectors = found["embeddings"]
    assert [len(vector) for vector in vectors] == [256] * 3
    assert vectors[0] == pytest.approx(found["embedding"], abs=1e-6)
    assert vectors[1] != pytest.approx(vectors[0], abs=1e-2)

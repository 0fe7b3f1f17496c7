"""Haystack: chat and responses generators whole and streamed, tools, a type, an agent, a pipeline, embedders."""

import json

import pytest

pytestmark = pytest.mark.clients

ROME = [["get_weather", {"city": "Rome"}]]


@pytest.fixture(scope="module")
def found(run_client, embedder):
    return run_client("haystack_ai", embedder.url)


def test_every_way_to_ask_comes_to_the_same_answer(found):
    answer = found["chat"]["text"]
    assert answer.startswith("aserve serves")
    assert found["chat"]["usage"]["total_tokens"] > found["chat"]["usage"]["completion_tokens"] > 0
    assert found["chat_streamed"] == {"text": answer, "parts": answer, "finish_reason": "stop"}
    assert found["responses_streamed"] == {"text": answer, "parts": answer}
    assert found["choices"] == [answer, answer]
    assert {found[name] for name in ("chat_async", "prompt", "responses", "pipeline")} == {answer}


@pytest.mark.parametrize("name", ["auto_call", "required_call", "strict_call", "streamed_call", "responses_call"])
def test_a_tool_is_called(found, name):
    assert found[name] == ROME


def test_the_result_of_a_call_is_answered(found):
    """Catches a history with a call that is read otherwise than it was written."""
    assert found["result_of_a_call"]["calls"] == 0
    assert found["agent"] == {
        "roles": ["user", "assistant", "tool", "assistant"],
        "text": found["result_of_a_call"]["text"],
    }


def test_an_answer_of_a_type(found):
    told = json.loads(found["typed"])
    assert list(told) == ["total"]
    assert 0 <= told["total"] <= 99


def test_embedders(found):
    """Documents are embedded in batches, text by text the same as alone."""
    vectors = found["document_embedder"]
    assert [len(vector) for vector in vectors] == [256] * 3
    assert vectors[0] == pytest.approx(found["text_embedder"], abs=1e-6)
    assert vectors[1] != pytest.approx(vectors[0], abs=1e-2)

"""litellm, by chat completions, by responses and by messages: answers, streams, tools, structure, embeddings."""

import pytest

pytestmark = pytest.mark.clients

GRACE = {"name": "Grace", "age": 42}
OSLO = [["get_weather", {"city": "Oslo"}]]
PROVIDERS = ["openai", "hosted_vllm", "anthropic"]


@pytest.fixture(scope="module")
def found(run_client, embedder):
    return run_client("litellm_sdk", embedder.url)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_stream_comes_to_the_whole_answer(found, provider):
    whole, streamed = found["chat"][provider], found["chat_streamed"][provider]
    assert whole["text"].startswith("aserve serves")
    assert streamed.pop("tokens") > 0
    assert streamed == whole == found["chat_that_waits"][provider]
    assert whole["reason"] == "stop"


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_round_of_tools(found, provider):
    """The model calls without being forced to; litellm's message goes back as it writes it, whole and from a stream."""
    whole, streamed = found["tools"][provider]
    called, answered = whole
    assert (called["calls"], called["reason"]) == (OSLO, "tool_calls")
    assert answered["text"].startswith("It is sunny in ")
    assert streamed == whole
    assert found["tools_forced"][provider] == [OSLO, OSLO]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_answer_of_a_type(found, provider):
    whole, streamed = found["structured"][provider]
    assert streamed == whole
    assert (sorted(whole), type(whole["age"])) == (["age", "name"], int)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_any_json(found, provider):
    assert found["json_object"][provider] == GRACE


def test_other_faces(found):
    text = found["chat"]["openai"]["text"]
    assert found["messages"] == dict.fromkeys(PROVIDERS, text)
    assert found["responses"] == [text, text]
    assert isinstance(found["completion"], str)
    assert found["completion"]


def test_vectors(found):
    assert found["embeddings"]["openai"] == found["embeddings"]["hosted_vllm"]
    assert found["embeddings"]["openai"][0] == [256, 256]
    assert found["rerank"] == [[0, True]]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_errors_are_its_own_classes(found, provider):
    assert found["errors"][provider]["raised"] == "BadRequestError"
    assert "temperature" in found["errors"][provider]["message"]


def test_effort_is_taken(found):
    assert found["reasoning_effort"] == dict.fromkeys(PROVIDERS[:2], found["chat"]["openai"]["text"])

"""DSPy through dspy.LM: Predict, ChainOfThought and ReAct under its adapters, native calls, embeddings."""

import pytest

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def found(run_client, embedder):
    return run_client("dspy_programs", embedder.url)


def test_every_way_to_ask_comes_to_the_same_answer(found):
    [answer] = found["plain"]["text"]
    assert answer.startswith("aserve serves")
    assert found["plain_async"] == [answer]
    assert found["responses"] == [{"text": answer}]
    assert found["plain"]["usage"]["completion_tokens"] > 0
    assert found["text"] != [""]


def test_choices_and_log_probabilities(found):
    """Three choices, of which not all are one story told three times."""
    assert len(found["choices"]) == 3
    assert len(set(found["choices"])) > 1
    assert found["with_logprobs"] == 4


@pytest.mark.parametrize("adapter", ["chat", "xml", "json", "chat_falls_back_on_json"])
def test_predict(found, adapter):
    """An int is read out of what the adapter asked for; the last finds no headings, and asks once more for JSON."""
    assert isinstance(found[f"predict_{adapter}"], int)


@pytest.mark.parametrize("adapter", ["chat", "json"])
def test_chain_of_thought(found, adapter):
    told = found[f"thought_{adapter}"]
    assert isinstance(told["total"], int)
    assert 1 <= len(told["reasoning"]) <= 24


@pytest.mark.parametrize("adapter", ["chat", "json"])
def test_react_runs_a_tool_and_answers(found, adapter):
    trajectory = found[f"react_{adapter}"]["trajectory"]
    assert trajectory["tool_name_0"] == "get_weather"
    assert trajectory["observation_0"] == f"It rains in {trajectory['tool_args_0']['city'][:8]}."
    assert found[f"react_{adapter}"]["answer"]


def test_calls_as_the_api_has_them(found):
    [[name, arguments]] = found["native_calls"]
    assert (name, list(arguments)) == ("get_weather", ["city"])


def test_embeddings(found):
    assert found["embeddings"] == [[256], [256]]

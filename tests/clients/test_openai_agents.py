"""openai-agents with its default model, which is /v1/responses: runs, streams, tools, types, conversations."""

import pytest

pytestmark = pytest.mark.clients

CALLED = ["ToolCallItem", "ToolCallOutputItem", "MessageOutputItem"]


@pytest.fixture(scope="module")
def found(run_client):
    return run_client("openai_agents")


def test_a_stream_comes_to_the_whole_answer(found):
    assert found["whole"].startswith("aserve serves")
    assert found["streamed"]["answer"] == found["whole"]
    assert found["streamed"]["events"] == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        *("response.output_text.delta", "response.output_text.done", "response.content_part.done"),
        *("response.output_item.done", "response.completed"),
    ]


@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_a_round_of_tools(found, choice):
    """The model calls, the agent runs the tool, and its output is answered."""
    assert found[choice]["kinds"] == CALLED
    assert found[choice]["outputs"] == ["It rains in Rome."]


def test_an_answer_of_a_type(found):
    assert isinstance(found["total"], int)


def test_a_conversation_by_the_id_of_a_response_is_that_of_its_items(found):
    """Catches a history that is told otherwise when the server keeps it than when the client does."""
    assert found["chained"] == found["flat"]


def test_a_handoff(found):
    assert found["handed_off"] == {
        "kinds": ["HandoffCallItem", "HandoffOutputItem", "MessageOutputItem"],
        "last": "other",
    }

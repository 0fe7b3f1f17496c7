"""MCP by openai-agents: it lists the tools of a server over stdio, and the model calls them."""

import pytest

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def found(run_client):
    return run_client("mcp_tools")


@pytest.mark.parametrize("choice", ["auto", "required", "get_weather"])
@pytest.mark.parametrize("face", ["chat", "responses"])
def test_a_tool_of_an_mcp_server_is_called(found, face, choice):
    """Catches a schema as MCP writes it (titles, an output schema) that is refused, and a result that is not told."""
    told = found[f"{face}, {choice}"]
    assert told["kinds"] == ["ToolCallItem", "ToolCallOutputItem", "MessageOutputItem"]
    assert told["arguments"] == [{"city": "Rome"}]
    assert told["outputs"] == [{"type": "text", "text": "It rains in Rome."}]


@pytest.mark.parametrize("choice", ["auto", "required", "get_weather"])
def test_both_faces_tell_the_model_of_a_result_in_the_same_way(found, choice):
    assert found[f"chat, {choice}"]["answer"] == found[f"responses, {choice}"]["answer"] != ""

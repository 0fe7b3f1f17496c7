"""Anthropic's SDK: a text, a stream, a round of tools, counts and errors, as its own types have them."""

import pytest

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def found(run_client):
    return run_client("anthropic_sdk")


def test_a_stream_comes_to_the_whole_answer(found):
    assert found["whole"]["content"][0]["text"].startswith("aserve serves")
    assert found["whole"]["stop_reason"] == "end_turn"
    assert found["together"] == found["whole"]
    assert [kind for kind in found["kinds"] if kind != "text"] == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]


def test_a_round_of_tools(found):
    [call] = found["called"]["content"]
    assert (call["name"], found["called"]["stop_reason"]) == ("get_weather", "tool_use")
    assert len(call["input"]["city"]) <= 8
    assert found["called_together"] == found["called"]
    assert found["answered"]["usage"]["input_tokens"] == found["counted"] > found["called"]["usage"]["input_tokens"]


def test_errors_are_its_own_classes(found):
    assert found["unknown_model"]["kind"] == "NotFoundError"
    assert found["image"]["kind"] == "BadRequestError"
    assert "blocks of the type 'image' are not supported" in found["image"]["body"]["error"]["message"]
    assert found["image"]["request_id"] == found["image"]["body"]["request_id"]

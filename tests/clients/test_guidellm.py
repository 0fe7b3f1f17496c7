"""GuideLLM: a short benchmark of each kind of request ends with no request failed, and counts every token."""

import pytest

from tests.e2e.server_process import ROOT

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

ANSWERED = {"successful": 6, "errored": 0, "incomplete": 0}


@pytest.fixture(scope="module")
def found(run_client):
    return run_client("guidellm_run", str(ROOT / "aserve/demo"))


@pytest.mark.parametrize("name", ["completions", "chat", "responses"])
def test_each_request_is_answered_by_as_many_tokens_as_it_asked_for(found, name):
    assert found[name]["requests"] == ANSWERED
    assert found[name]["output_tokens"] == 16
    assert found[name]["prompt_tokens"] >= 32


def test_both_chats_count_the_same_prompt(found):
    assert found["chat"]["prompt_tokens"] == found["responses"]["prompt_tokens"]


def test_a_conversation_goes_on_where_the_server_keeps_it(found):
    """Catches a second turn that is told without the first: its prompt is no longer than one of a single turn."""
    assert found["history"]["requests"] == ANSWERED
    assert found["history"]["prompt_tokens"] > found["responses"]["prompt_tokens"] + 16


def test_a_turn_that_has_to_be_a_call_is_one(found):
    """GuideLLM counts an answer without the call that it asked for as an error."""
    assert found["calls"]["requests"] == ANSWERED

"""GuideLLM: a short benchmark of each kind of request ends with no request failed, and counts every token."""

import pytest

from tests.e2e.server_process import ROOT

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def found(run_client):
    return run_client("guidellm_run", str(ROOT / "aserve/demo"))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_each_request_is_answered_by_as_many_tokens_as_it_asked_for(found, path):
    told = found[path]
    assert told["requests"] == {"successful": 6, "errored": 0, "incomplete": 0}
    assert told["output_tokens"] == 16
    assert told["prompt_tokens"] >= 32


def test_both_chats_count_the_same_prompt(found):
    assert found["/v1/chat/completions"]["prompt_tokens"] == found["/v1/responses"]["prompt_tokens"]

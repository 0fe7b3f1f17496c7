"""lm-eval: log-likelihoods and generation by completions and by chat, on tasks that the program writes itself."""

import pytest

pytestmark = pytest.mark.clients

CAPITALS = ["The capital of France is Paris.", "The capital of Italy is Rome.", "The capital of Japan is Tokyo."]


@pytest.fixture(scope="module")
def found(run_client):
    return run_client("lm_evaluation")


def test_the_likeliest_ending_is_the_right_one(found):
    """Catches scores that belong to another token or choice: only the right ending is what greedy sampling says."""
    assert found["choice"]["scores"]["acc,none"] == 1.0
    told = [[is_greedy for [(_, is_greedy)] in document] for document in found["choice"]["responses"]]
    assert told == [[i == k for k in range(3)] for i in range(3)]


def test_batches_score_the_same_as_prompts_alone(found):
    """To the last bit: scores that depend on the batch differ by a little."""
    assert found["choice_in_batches"] == found["choice"]


@pytest.mark.parametrize("name", ["generate", "generate_from_text", "chat"])
def test_generation_stops_where_it_is_told_to(found, name):
    assert found[name]["scores"]["exact_match,none"] == 1.0
    assert [document[0][0] for document in found[name]["responses"]] == CAPITALS


def test_a_rolling_log_likelihood_is_that_of_the_prompt(found, server):
    """Its echoed scores, and those that the server gives as `prompt_logprobs`: a text after its end token."""
    for text, [[told]] in zip(CAPITALS, found["rolling"]["responses"], strict=True):
        body = {"prompt": f"<|im_end|>{text}", "prompt_logprobs": 0, "max_tokens": 1, "temperature": 0}
        [choice] = server.http.post("/v1/completions", json=body).json()["choices"]
        scores = [next(iter(token.values()))["logprob"] for token in choice["prompt_logprobs"][1:]]
        assert told == pytest.approx(sum(scores), abs=1e-4)

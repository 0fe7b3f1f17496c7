"""LLM.embed, classify and score: lists in, lists out, in their order; what a model is not for is refused."""

import msgspec
import numpy as np
import pytest

from aserve import LLM, ConfigError, InvalidRequestError
from aserve.build import make_options
from aserve.core.pooling import Pooling
from aserve.models.pooling import PoolingPlan
from aserve.poolers import check_options
from tests.pooling_checkpoints import write_pooling


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    auto = "AutoModelForCausalLM"
    return write_pooling(tmp_path_factory.mktemp("pooling") / "model", "qwen3", auto, method="last", is_matryoshka=True)


def test_embeddings_and_scores_of_a_decoder(folder):
    with LLM(folder) as llm:
        one, other, again = llm.embed(["hello world", [1, 2, 3], "hello world"])
        assert np.linalg.norm(np.asarray(one.values)) == pytest.approx(1.0, abs=1e-6)
        assert other.prompt_token_ids == (1, 2, 3)
        assert np.allclose(one.values, again.values, atol=1e-6)
        [short] = llm.embed("hello world", dimensions=8)
        wanted = np.asarray(one.values)[:8] / np.linalg.norm(one.values[:8])
        assert np.allclose(short.values, wanted, atol=1e-6)
        assert llm.score("hello world", ["hello world", "x"]) == pytest.approx(
            [1.0, float(np.dot(one.values, llm.embed("x")[0].values))], abs=1e-5
        )
        with pytest.raises(InvalidRequestError, match="--convert classify"):
            llm.classify("hello")
        with pytest.raises(InvalidRequestError, match="--runner generate"):
            llm.generate("hello", use_tqdm=False)
        with pytest.raises(ValueError, match="2 given for 3"):
            llm.score(["a", "b"], ["c", "d", "e"])


def test_a_prefix_that_was_computed_is_found_again(folder):
    """Without the cache it is computed twice; with it at another last token, the vector would be wrong."""
    with LLM(folder, block_size=8) as llm:
        whole = list(range(1, 41))
        llm.embed([whole])
        [found] = llm.embed([[*whole[:32], 99]])
        assert found.num_cached_tokens == 32
        [fresh] = llm.embed([[*whole[:32], 99]], cache_salt="other")
        assert fresh.num_cached_tokens == 0
        assert np.allclose(found.values, fresh.values, atol=1e-5)


def test_options_that_are_about_generating_are_refused(folder):
    with pytest.raises(ConfigError, match="speculative_config: not with a model that pools"):
        LLM(folder, speculative_config={"method": "ngram", "num_speculative_tokens": 2})


def test_an_encoder_takes_no_quantization_and_a_decoder_does():
    options = make_options(quantization="int8")
    plan = PoolingPlan(pooling=Pooling(task="embed", method="cls", size=0, activation="normalize"), family=None)
    check_options(options, plan)
    with pytest.raises(ConfigError, match="quantization: not with a model that pools"):
        check_options(
            options, msgspec.structs.replace(plan, pooling=msgspec.structs.replace(plan.pooling, is_causal=False))
        )


def test_a_model_that_generates_says_how_it_is_made_to_embed():
    with LLM("demo") as llm, pytest.raises(InvalidRequestError, match="--runner pooling"):
        llm.embed("hello")

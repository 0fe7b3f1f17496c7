"""The checkpoints for comparisons: the shapes that they promise, the same every time, and servable."""

import json

import make_models
import pytest
from transformers import AutoTokenizer

from aserve import LLM, SamplingParams
from aserve.load.prompts import Prompts

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_models.make_model("tiny", folder)
    return folder / "tiny"


@pytest.mark.thorough
def test_tiny_has_its_shape_and_answers(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config | make_models.TINY == config
    assert config["dtype"] == "float32"
    assert (folder / "model.safetensors").stat().st_size == pytest.approx(4 * 5.0e6, rel=0.01)
    with LLM(str(folder), device="cpu", kv_cache_memory_bytes=2**24) as llm:
        (answer,) = llm.generate(
            [[300] * 20], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False
        )
    assert len(answer.token_ids) == 4


def test_its_tokenizer_knows_words_and_chatml(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == make_models.TINY["vocab_size"]
    assert len(Prompts.of_tokenizer(folder, as_text=True).pool) > 100
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert shown == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(shown)[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")

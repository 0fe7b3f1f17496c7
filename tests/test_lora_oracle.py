"""PEFT as the oracle: an adapter that it has made and saved gives the tokens that it gives itself."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from aserve import LLM, SamplingParams
from tests.checkpoints import checkpoints

__all__ = ["checkpoints"]
peft = pytest.importorskip("peft", reason="peft is among the packages for development: pip install -e '.[dev]'")
pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PROMPTS = [[7, 8, 9], [3, 1, 4, 1, 5] * 9]
NUM_TOKENS = 16


@pytest.mark.parametrize(("recipe", "is_rank_stabilized"), [("llama", False), ("qwen2_tied", True), ("qwen3", False)])
def test_tokens_are_those_that_peft_generates(
    checkpoints: Callable[[str], Path], tmp_path: Path, recipe: str, is_rank_stabilized: bool
) -> None:
    """Not merged there either: names, scale and files are as PEFT means them, whatever our own tests take them for."""
    from transformers import AutoModelForCausalLM

    config = peft.LoraConfig(
        r=6, lora_alpha=24, target_modules="all-linear", use_rslora=is_rank_stabilized, init_lora_weights=False
    )
    torch.manual_seed(0)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoints(recipe), dtype=torch.float32), config)
    model.save_pretrained(tmp_path / "adapter")
    model.eval()

    def generated(prompt: list[int]) -> tuple[int, ...]:
        ids = torch.tensor([prompt])
        limits = {"min_new_tokens": NUM_TOKENS, "max_new_tokens": NUM_TOKENS}
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, **limits)
        return tuple(out[0, len(prompt) :].tolist())

    expected = [generated(prompt) for prompt in PROMPTS]
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS)
    with LLM(checkpoints(recipe), enable_lora=True, lora_modules={"a": tmp_path / "adapter"}) as llm:
        adapted = llm.generate(PROMPTS, greedy, use_tqdm=False, lora="a")
        plain = llm.generate(PROMPTS, greedy, use_tqdm=False)
    assert [completion.token_ids for completion in adapted] == expected
    assert [completion.token_ids for completion in plain] != expected

"""Models whose keys and values are of a smaller type than theirs: the same in any step, and how far off they are."""

import pytest
import torch

from aserve.kernels.cpu import CpuOps
from aserve.kernels.ops import Ops
from aserve.kernels.reference import ReferenceOps
from aserve.kernels.reference_fp8 import FP8
from aserve.model_folder import DEMO_FOLDER
from aserve.text.tokenizer import Tokenizer
from tests.kernels.cases import native_ops
from tests.models.paged import PagedSequences
from tests.models.test_quantization import NUM_GREEDY, PROMPT, ROOT, TOKENS, greedy, load, logits, share

pytestmark = pytest.mark.torch
BF16, FP32 = torch.bfloat16, torch.float32

MOST_OFF = {
    ("demo", "float32", BF16): (0.004, 0.995),
    ("demo", "bfloat16", FP8): (0.05, 0.96),
    ("q05", "float32", BF16): (0.01, 0.97),
    ("q05", "bfloat16", FP8): (0.12, 0.8),
}
"""By the model, its type and that of the cache: the error of the logits, and the share of tokens that stay the
likeliest. Of random weights, little decides."""


@pytest.mark.parametrize("recipe", ["llama", "qwen3"])
@pytest.mark.parametrize("ops", [native_ops, CpuOps], ids=["native", "torch"])
def test_a_model_has_the_logits_that_it_has_by_the_twin(recipe, ops, checkpoints):
    """In one step and token by token. Catches a layer that writes or reads another type than the other does."""
    folder = checkpoints(recipe)
    expected = logits(load(folder, None, "float32", ReferenceOps()), BF16)
    model = load(folder, None, "float32", ops())
    torch.testing.assert_close(logits(model, BF16), expected, atol=1e-3, rtol=1e-3)
    sequences = PagedSequences(model, max_len=len(TOKENS), dtype=BF16)
    one_by_one = torch.cat([sequences.run([(0, [token])])[0] for token in TOKENS])
    torch.testing.assert_close(one_by_one, expected, atol=1e-3, rtol=1e-3)
    assert 0 < share(expected - logits(model, FP32), expected) < 0.05


def test_a_cache_of_float8_is_not_far_off(checkpoints):
    """By the twin, which a GPU's kernels are held to in tests/kernels/test_cache_dtypes.py."""
    model = load(checkpoints("llama"), None, "float32", ReferenceOps())
    exact = logits(model, FP32)
    assert 0.001 < share(logits(model, FP8) - exact, exact) < 0.2


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "cache_dtype"), MOST_OFF, ids=str)
def test_how_far_off_logits_and_greedy_tokens_are(name, dtype, cache_dtype):
    """The figures of docs/performance.md, which are printed: greedy tokens of the model, computed again."""
    folder = DEMO_FOLDER if name == "demo" else ROOT / "models" / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: python scripts/make_models.py models")
    prompt = list(Tokenizer.load(folder).encode(PROMPT))
    plain = load(folder, None, dtype)
    own = getattr(torch, dtype)
    tokens = greedy(plain, prompt, NUM_GREEDY, own)
    exact = logits(plain, own, tokens)[len(prompt) - 1 : -1]
    likeliest = torch.tensor(tokens[len(prompt) :])
    ops: Ops | None = ReferenceOps() if cache_dtype is FP8 else None
    found = logits(load(folder, None, dtype, ops), cache_dtype, tokens)[len(prompt) - 1 : -1]
    off, same = share(found - exact, exact), float((found.argmax(-1) == likeliest).float().mean())
    print(f"\n{name} {dtype}, cache {cache_dtype}: logits' error {off:.4f}, the same likeliest token {same:.3f}")
    most_off, least_same = MOST_OFF[name, dtype, cache_dtype]
    assert off < most_off
    assert same >= least_same

"""Models whose linear layers are int8: those of the twin, why there are none, and how far off they are."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from load.adapters import write_adapter
from torch import Tensor

from aserve.core.errors import ConfigError
from aserve.core.quantization import QUANTIZATIONS
from aserve.kernels.cpu import CpuOps
from aserve.kernels.ops import Ops
from aserve.kernels.reference import ReferenceOps
from aserve.kernels.reference_int8 import int8_linear
from aserve.model_folder import DEMO_FOLDER
from aserve.models import loader
from aserve.models.checkpoint import resolve_checkpoint
from aserve.models.interface import CausalLM
from aserve.models.layers import DenseMethod
from aserve.models.lora import LoraLayers
from aserve.models.peft import inspect_adapter
from aserve.text.tokenizer import Tokenizer
from tests.kernels.cases import native_ops
from tests.models.paged import PagedSequences

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3]
PROMPT = "Tell me what paged attention is, and then a story about a fox."
NUM_GREEDY = 500
INT8 = [name for name in QUANTIZATIONS if name.startswith("int8")]
MOST_OFF = {"demo": (0.05, 0.96), "q05": (0.12, 0.8)}
"""The error of the logits, and the share of tokens that stay the likeliest: of random weights, little decides."""


class Twin(NamedTuple):
    """The twin's products, as `LinearOps`."""

    group: int

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        return int8_linear(x_TI, weight_OI, bias_O, group=self.group)

    def linear_silu_and_mul(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        return native_ops().silu_and_mul(self.linear(x_TI, weight_OI, bias_O))


def load(folder: Path, quantization: str | None, dtype: str, ops: Ops | None = None) -> CausalLM:
    checkpoint = resolve_checkpoint(str(folder), None, None, trust_remote_code=False)
    ops = ops or native_ops()
    return loader.load_model(checkpoint, device="cpu", ops=ops, dtype=dtype, quantization=quantization)


@pytest.mark.parametrize("recipe", ["llama", "llama_tied"])
@pytest.mark.parametrize("quantization", INT8)
def test_a_model_has_the_logits_of_one_by_the_twins_product(recipe, quantization, checkpoints, monkeypatch):
    """To the bit, all linear layers and the head. Catches a layer that is left out, or a head of the wrong table."""
    folder = checkpoints(recipe)
    found = logits(load(folder, quantization, "float32"), torch.float32)
    twin = DenseMethod(Twin(QUANTIZATIONS[quantization].group))
    monkeypatch.setattr(loader, "linear_method", lambda *_: twin)
    assert torch.equal(found, logits(load(folder, None, "float32"), torch.float32))
    monkeypatch.undo()
    plain = logits(load(folder, None, "float32"), torch.float32)
    assert 0 < share(found - plain, plain) < 0.1


@pytest.mark.parametrize("quantization", ["int8", "int8-g32"])
def test_adapters_add_to_layers_of_int8(quantization, checkpoints, monkeypatch, tmp_path):
    """As they add to the twin's. Catches an adapter that has no effect there, or is quantized as well."""
    folder = checkpoints("llama")
    write_adapter(tmp_path / "adapter", str(folder), 4, seed=1)

    def adapted(ops: Ops) -> tuple[Tensor, Tensor]:
        lora = LoraLayers(1, 4, ops, torch.float32, torch.device("cpu"))
        checkpoint = resolve_checkpoint(str(folder), None, None, trust_remote_code=False)
        how = {"device": "cpu", "dtype": "float32", "quantization": quantization}
        model = loader.load_model(checkpoint, ops=ops, lora=lora, **how)
        lora.allocate()
        lora.put(0, lora.read(inspect_adapter(tmp_path / "adapter", lora.modules, 4)))
        runs = [PagedSequences(model, max_len=len(TOKENS), slots=[slot], num_slots=1) for slot in (0, -1)]
        return runs[0].run([(0, TOKENS)])[0], runs[1].run([(0, TOKENS)])[0]

    ops = native_ops()
    found, without = adapted(ops)
    assert not torch.equal(found, without)
    twin = DenseMethod(Twin(QUANTIZATIONS[quantization].group))
    monkeypatch.setattr(loader, "linear_method", lambda *_: twin)
    assert torch.equal(found, adapted(ops)[0])


REFUSED = {
    "float16": ("llama", "float16", None, "dtype is float16, and has to be float32 or bfloat16"),
    "torch's kernels": ("llama", "float32", CpuOps("there is no compiler"), "own CPU kernels: there is no compiler"),
    "other operations": ("llama", "float32", ReferenceOps(), "these operations have no products of it"),
    "transformers'": ("gpt2", "float32", None, "is not for GPT2LMHeadModel: it runs through transformers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_where_there_is_no_product_of_int8_a_line_says_why(case, checkpoints):
    recipe, dtype, ops, message = REFUSED[case]
    with pytest.raises(ConfigError, match=f"quantization int8.*{message}"):
        load(checkpoints(recipe), "int8", dtype, ops)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", MOST_OFF)
def test_how_far_off_logits_and_greedy_tokens_are(name):
    """The figures of docs/performance.md, which are printed: greedy tokens of the model in bfloat16, computed again."""
    folder = DEMO_FOLDER if name == "demo" else ROOT / "models" / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: python scripts/make_models.py models")
    prompt = list(Tokenizer.load(folder).encode(PROMPT))
    plain = load(folder, None, "bfloat16")
    tokens = greedy(plain, prompt, NUM_GREEDY)
    exact = logits(plain, torch.bfloat16, tokens)[len(prompt) - 1 : -1]
    likeliest = torch.tensor(tokens[len(prompt) :])
    del plain
    for quantization in INT8:
        found = logits(load(folder, quantization, "bfloat16"), torch.bfloat16, tokens)[len(prompt) - 1 : -1]
        off = share(found - exact, exact)
        same = float((found.argmax(-1) == likeliest).float().mean())
        print(f"\n{name} {quantization}: logits' error {off:.4f}, the same likeliest token {same:.3f}")
        assert off < MOST_OFF[name][0]
        assert same >= MOST_OFF[name][1]


def logits(model: CausalLM, dtype: torch.dtype, tokens: list[int] | None = None) -> Tensor:
    """Of each position, [T, V]."""
    tokens = tokens or TOKENS
    return PagedSequences(model, max_len=len(tokens), dtype=dtype).run([(0, tokens)])[0]


def greedy(model: CausalLM, prompt: list[int], num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[int]:
    """The prompt and the likeliest tokens after it. dtype: of the cache."""
    sequences, tokens, begin = PagedSequences(model, max_len=len(prompt) + num_tokens, dtype=dtype), prompt, 0
    for _ in range(num_tokens):
        found = sequences.run([(0, tokens[begin:])])[0][-1]
        begin, tokens = len(tokens), [*tokens, int(found.argmax())]
    return tokens


def share(error_TV: Tensor, of_TV: Tensor) -> float:
    """The size of an error over that of what it is of, the mean of each row taken off both."""
    parts = [part - part.mean(-1, keepdim=True) for part in (error_TV, of_TV)]
    return float(parts[0].norm() / parts[1].norm())

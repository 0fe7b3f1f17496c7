"""Models whose linear layers are float8: which layers are, what adapters add, and where there are none."""

import pytest
import torch
from load.adapters import write_adapter
from torch import Tensor

from aserve.core.config import Options
from aserve.core.errors import ConfigError
from aserve.core.quantization import why_not
from aserve.kernels.cpu import CpuOps
from aserve.kernels.ops import Fp8Ops, Ops
from aserve.kernels.reference import ReferenceOps
from aserve.kernels.reference_fp8 import FP8, fp8_linear, quantize
from aserve.model_folder import DEMO_FOLDER
from aserve.models import loader
from aserve.models.checkpoint import resolve_checkpoint
from aserve.models.inspection import read_headers
from aserve.models.interface import CausalLM
from aserve.models.layers import LinearShape
from aserve.models.loader import load_model
from aserve.models.lora import LoraLayers
from aserve.models.peft import inspect_adapter
from aserve.models.quantized import Fp8Method
from aserve.models.weights import RandomWeights
from aserve.planning import spec_of, why_not_quantized
from aserve.text.tokenizer import Tokenizer
from aserve.weight_plan import plan_weights
from tests.kernels.cases import native_ops
from tests.models.paged import PagedSequences
from tests.models.test_quantization import NUM_GREEDY, PROMPT, ROOT, TOKENS, greedy, logits, share

pytestmark = pytest.mark.torch

MOST_OFF = {"demo": (0.06, 0.96), "q05": (0.3, 0.5)}
"""The error of the logits, and the share of tokens that stay the likeliest: of random weights, little decides."""


class Products(ReferenceOps):
    """The twin's operations with the twin's products; what they multiplied, by its outputs and its type."""

    def __init__(self, why_not: str | None = None, most_rows: int = 64) -> None:
        """most_rows: that are not quantized."""
        self.multiplied: set[tuple[int, torch.dtype]] = set()
        self._why_not, self._most_rows = why_not, most_rows

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, scale_O: Tensor | None = None) -> Tensor:
        self.multiplied.add((len(weight_OI), weight_OI.dtype))
        if scale_O is None:
            return torch.nn.functional.linear(x_TI, weight_OI, bias_O)
        return fp8_linear(x_TI, weight_OI, bias_O, scale_O, quantizes_rows=len(x_TI) > self._most_rows)

    def linear_silu_and_mul(
        self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, scale_O: Tensor | None = None
    ) -> Tensor:
        return self.silu_and_mul(self.linear(x_TI, weight_OI, bias_O, scale_O))

    def quantize_weight(self, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        return quantize(weight_OI)

    def why_no_fp8(self, device: torch.device) -> str | None:
        return self._why_not


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is taken for one."""
    monkeypatch.setattr(loader, "why_not", lambda *names, device, **where: why_not(*names, device="cuda", **where))


def load(folder, ops: Ops, dtype: str = "bfloat16", quantization: str | None = "fp8") -> CausalLM:
    checkpoint = resolve_checkpoint(str(folder), None, None, trust_remote_code=False)
    return load_model(checkpoint, device="cpu", ops=ops, dtype=dtype, quantization=quantization)


@pytest.mark.parametrize("recipe", ["llama", "llama_tied", "qwen2", "qwen3"])
def test_all_linear_layers_but_the_head_are_float8(as_on_a_gpu, recipe, checkpoints):
    folder, ops = checkpoints(recipe), Products()
    assert isinstance(ops, Fp8Ops)
    model = load(folder, ops)
    found = logits(model, torch.bfloat16)
    assert {size for size, dtype in ops.multiplied if dtype is not FP8} == {model.spec.vocab_size}
    assert {dtype for size, dtype in ops.multiplied if size != model.spec.vocab_size} == {FP8}
    plain = logits(load(folder, ReferenceOps(), quantization=None), torch.bfloat16)
    assert 0.001 < share(found.float() - plain.float(), plain.float()) < 0.2


def test_adapters_add_to_layers_of_float8(as_on_a_gpu, checkpoints, tmp_path):
    folder, ops = checkpoints("llama"), Products()
    write_adapter(tmp_path / "adapter", str(folder), 4, seed=1)
    lora = LoraLayers(1, 4, ops, torch.bfloat16, torch.device("cpu"))
    checkpoint = resolve_checkpoint(str(folder), None, None, trust_remote_code=False)
    model = load_model(checkpoint, device="cpu", ops=ops, dtype="bfloat16", quantization="fp8", lora=lora)
    lora.allocate()
    lora.put(0, lora.read(inspect_adapter(tmp_path / "adapter", lora.modules, 4)))

    def run(slot: int) -> Tensor:
        sequences = PagedSequences(model, max_len=len(TOKENS), dtype=torch.bfloat16, slots=[slot], num_slots=1)
        return sequences.run([(0, TOKENS)])[0]

    assert torch.equal(run(-1), logits(load(folder, Products()), torch.bfloat16))
    assert not torch.equal(run(0), run(-1))


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", MOST_OFF)
def test_how_far_off_logits_and_greedy_tokens_are(as_on_a_gpu, name):
    """The figures of docs/performance.md, which are printed: as of int8, by the twin, near which a GPU is."""
    folder = DEMO_FOLDER if name == "demo" else ROOT / "models" / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: python scripts/make_models.py models")
    prompt = list(Tokenizer.load(folder).encode(PROMPT))
    plain = load(folder, native_ops(), quantization=None)
    tokens = greedy(plain, prompt, NUM_GREEDY)
    exact = logits(plain, torch.bfloat16, tokens)[len(prompt) - 1 : -1]
    likeliest = torch.tensor(tokens[len(prompt) :])
    del plain
    for most_rows, rows in ((len(tokens), "as they are"), (0, "quantized")):
        found = logits(load(folder, Products(most_rows=most_rows)), torch.bfloat16, tokens)[len(prompt) - 1 : -1]
        off, same = share(found - exact, exact), float((found.argmax(-1) == likeliest).float().mean())
        print(f"\n{name}, rows {rows}: logits' error {off:.4f}, the same likeliest token {same:.3f}")
        assert off < MOST_OFF[name][0]
        assert same >= MOST_OFF[name][1]


REFUSED = {
    "float32": (Products(), "float32", "dtype is float32, and has to be bfloat16 or float16; choose with --dtype"),
    "other operations": (ReferenceOps(), "bfloat16", "these operations have no products of it"),
    "an old GPU": (Products("this GPU does not multiply it"), "bfloat16", "this GPU does not multiply it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_where_there_is_no_product_of_float8_a_line_says_why(as_on_a_gpu, case, checkpoints):
    ops, dtype, message = REFUSED[case]
    with pytest.raises(ConfigError, match=f"quantization fp8: {message}"):
        load(checkpoints("llama"), ops, dtype)


def test_on_a_cpu_it_is_refused_whatever_the_operations(checkpoints):
    for ops in (CpuOps("there is no compiler"), Products()):
        with pytest.raises(ConfigError, match="quantization fp8: there is none but on a GPU; choose int8 on a CPU"):
            load(checkpoints("llama"), ops)


@pytest.mark.parametrize(
    ("quantization", "device", "dtype", "message"),
    [
        ("fp8", "cpu", "bfloat16", "quantization fp8: there is none but on a GPU; choose int8 on a CPU"),
        ("fp8", "cuda", "float32", "quantization fp8: dtype is float32, and has to be bfloat16 or float16"),
        ("fp8", "cuda", "bfloat16", None),
        ("int8", "cuda", "bfloat16", "quantization int8: there is none but on a CPU; choose fp8, or --device cpu"),
        ("int8-g32", "cpu", "float16", "quantization int8-g32: dtype is float16, and has to be float32 or bfloat16"),
        ("int8", "cpu", "auto", None),
        (None, "cuda", "auto", None),
    ],
)
def test_what_is_known_before_anything_is_loaded(checkpoints, quantization, device, dtype, message):
    checkpoint = resolve_checkpoint(str(checkpoints("llama")), None, None, trust_remote_code=False)
    found = why_not_quantized(Options(quantization=quantization, dtype=dtype), checkpoint, device)
    assert found is None if message is None else found.startswith(message)


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(24, 64), (64, 24)])
def test_a_layer_of_a_size_that_is_not_multiplied_is_named(num_outputs, num_inputs):
    weights = RandomWeights(torch.bfloat16, torch.device("cpu"), seed=0)
    shape = LinearShape({"up_proj": num_outputs}, num_inputs)
    with pytest.raises(ConfigError, match=rf"up_proj is {num_outputs} x {num_inputs}, .* multiples of 16"):
        Fp8Method(Products()).load(weights, shape)


def test_nothing_is_kept_of_a_weight_but_its_bytes_and_scales():
    weights = RandomWeights(torch.bfloat16, torch.device("cpu"), seed=0)
    layer = Fp8Method(Products()).load(weights, LinearShape({"up_proj": 32}, 64))
    tensors = [value for name in layer.__slots__ if isinstance(value := getattr(layer, name), Tensor)]
    assert sum(tensor.nbytes for tensor in tensors) == 32 * 64 + 32 * 4


def test_a_plan_foretells_what_the_weights_take(checkpoints):
    """A byte less for each weight of a layer, but four for each of its outputs; tables and head as without."""
    for recipe in ("llama", "llama_tied"):
        folder = checkpoints(recipe)
        checkpoint = resolve_checkpoint(str(folder), None, None, trust_remote_code=False)
        spec = spec_of(checkpoint)
        plain, quantized = (
            plan_weights(checkpoint, spec, Options(model=str(folder), dtype="bfloat16", quantization=quantization))
            for quantization in (None, "fp8")
        )
        shapes = [
            tensor.shape
            for name, tensor in read_headers(checkpoint).items()
            if ".layers." in name and len(tensor.shape) == 2
        ]
        saved = sum(num_outputs * num_inputs - 4 * num_outputs for num_outputs, num_inputs in shapes)
        assert plain.memory_bytes - quantized.memory_bytes == saved
        assert plain.bytes_per_token - quantized.bytes_per_token == saved


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_gpu_serves_one_that_answers_as_it_did(batch_invariant):
    """By one row, by two, by some, and by many, prompts and decoding; most of the tokens are those of 16 bits."""
    from aserve import LLM, SamplingParams

    texts = [f"Tell me about paged attention, and then {n} stories about a fox." for n in range(80)]
    params = SamplingParams(temperature=0.0, max_tokens=6)
    answers = []
    for quantization in (None, "fp8"):
        options = {"device": "cuda", "quantization": quantization, "batch_invariant": batch_invariant}
        with LLM("demo", **options) as llm:
            asked = [texts[:1], texts[:2], texts[:9], texts]
            answers.append([answer.token_ids for few in asked for answer in llm.generate(few, params, use_tqdm=False)])
    same = [a == b for plain, fp8 in zip(*answers, strict=True) for a, b in zip(plain, fp8, strict=True)]
    assert sum(same) > 0.5 * len(same)

"""A model that ranks share computes what it computes alone: every native family, on 2 ranks and on 4, in float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aserve.core.errors import ConfigError
from aserve.kernels.dispatch import select_ops
from aserve.models.checkpoint import resolve_checkpoint
from aserve.models.layers import fill_share
from aserve.models.loader import load_model
from aserve.models.lora import LoraLayers
from aserve.models.peft import inspect_adapter
from aserve.models.sharding import Shard, Split, share_of
from aserve.models.spec import ModelSpec, read_spec
from aserve.models.weights import SafetensorsWeights
from tests.adapters import write_adapter
from tests.checkpoints import NATIVE_RECIPES, write_checkpoint
from tests.models.paged import PagedSequences
from tests.parallel.threads import on_ranks

pytestmark = [pytest.mark.torch, pytest.mark.slow]

CPU = torch.device("cpu")
TOKENS = [7, 300, 41, 0, 319, 12, 55, 55, 160, 161, 258, 3]


def logits(folder: Path, shard: Shard | None = None, adapter: Path | None = None, **options: Any) -> torch.Tensor:
    """Of a prompt in two pieces and of a token behind it; rank 0's are all of them."""
    ops = select_ops(CPU)
    mine = {} if shard is None else {"shard": shard}
    lora = None if adapter is None else LoraLayers(1, 16, ops, torch.float32, CPU, **mine)
    checkpoint = resolve_checkpoint(str(folder))
    model = load_model(checkpoint, device="cpu", ops=ops, dtype="float32", lora=lora, **mine, **options)
    if lora is not None and adapter is not None:
        lora.put(0, lora.read(inspect_adapter(adapter, lora.modules, lora.max_rank)))
    paged = PagedSequences(model, slots=None if lora is None else [0], num_slots=1)
    steps = (TOKENS[:5], TOKENS[5:11], TOKENS[11:])
    return torch.cat([paged.run([(0, step)])[0] for step in steps])


def shared(size: int, *args: Any, **options: Any) -> torch.Tensor:
    return on_ranks(size, lambda shard: logits(args[0], shard, *args[1:], **options))[0]


@pytest.mark.parametrize("recipe", NATIVE_RECIPES)
def test_two_ranks_compute_what_one_does(checkpoints: Callable[[str], Path], recipe: str) -> None:
    folder = checkpoints(recipe)
    torch.testing.assert_close(shared(2, folder), logits(folder), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_four_ranks_share_fewer_heads_of_keys_and_values(tmp_path: Path, kv_heads: int) -> None:
    """Heads that are too few are on several ranks each."""
    folder = write_checkpoint(tmp_path / "m", "qwen2", num_key_value_heads=kv_heads)
    torch.testing.assert_close(shared(4, folder), logits(folder), atol=2e-4, rtol=1e-4)


def test_a_vocabulary_that_no_rank_number_divides(tmp_path: Path) -> None:
    """Catches padding that reaches the logits, or another rank's rows."""
    folder = write_checkpoint(tmp_path / "m", "qwen2_tied", vocab_size=325)
    for size in (2, 4):
        together = shared(size, folder)
        assert together.shape[1] == 325
        torch.testing.assert_close(together, logits(folder), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("num_tokens", [5, 8])
def test_a_rank_behind_the_end_of_a_vocabulary_has_zeros_alone(tmp_path: Path, num_tokens: int) -> None:
    """Catches a share that begins behind the end, and one whose first row is left out. Shares are of 2 tokens."""
    table_VE = torch.arange(1.0, 1 + 3 * num_tokens).view(num_tokens, 3)
    save_file({"table": table_VE}, tmp_path / "w.safetensors")
    shares = []
    for rank in range(4):
        given = torch.float32, CPU, lambda *_: None, None, Shard(rank, 4)
        with SafetensorsWeights([tmp_path / "w.safetensors"], *given) as weights:
            out_VE = torch.full((2, 3), torch.nan)
            fill_share(weights, out_VE, "table", Split.VOCABULARY)
            shares.append(out_VE)
    padded_VE = torch.zeros(8, 3)
    padded_VE[:num_tokens] = table_VE
    assert torch.equal(torch.cat(shares), padded_VE)


def test_adapters_are_shared_as_their_layers_are(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoints("qwen2")
    adapter = write_adapter(tmp_path / "a", folder, size=0.6)
    adapted = logits(folder, None, adapter)
    assert (adapted - logits(folder)).abs().max() > 0.5
    torch.testing.assert_close(shared(2, folder, adapter), adapted, atol=5e-4, rtol=1e-3)


@pytest.mark.parametrize("quantization", ["int8", "int8-g32"])
def test_weights_of_int8_are_shared_too(tmp_path: Path, quantization: str) -> None:
    """A row of half the inputs has a scale of its own, so that numbers differ: by no more than int8 itself does."""
    folder = write_checkpoint(tmp_path / "m", "llama", hidden_size=128, intermediate_size=256)
    exact = logits(folder)
    alone, together = logits(folder, quantization=quantization), shared(2, folder, quantization=quantization)
    error = (alone - exact).abs().mean()
    assert (together - exact).abs().mean() < 1.3 * error


def test_random_weights_are_those_of_one_process(checkpoints: Callable[[str], Path]) -> None:
    folder = checkpoints("llama_tied")
    dummy = {"load_format": "dummy", "seed": 5}
    torch.testing.assert_close(shared(2, folder, **dummy), logits(folder, **dummy), atol=1e-5, rtol=1e-4)


def test_a_rank_reads_its_share_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a rank that has a whole matrix in memory before it cuts its part out."""
    import safetensors

    from aserve.models import weights

    folder = write_checkpoint(tmp_path / "m", "llama")
    whole: list[str] = []

    class Told:
        """A shard that tells which tensors were read whole."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self._file = safetensors.safe_open(*args, **options)

        def __enter__(self) -> "Told":
            self._file = self._file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

        def keys(self) -> list[str]:
            return self._file.keys()

        def get_slice(self, name: str) -> Any:
            return self._file.get_slice(name)

        def get_tensor(self, name: str) -> torch.Tensor:
            tensor = self._file.get_tensor(name)
            if tensor.dim() > 1:
                whole.append(name)
            return tensor

    monkeypatch.setattr(weights, "safe_open", Told)
    logits(folder)
    assert whole, "one process reads whole tensors"
    whole.clear()
    shared(2, folder)
    assert not whole


def test_a_tensor_that_is_not_there_or_not_finite_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 47] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(Exception, match=r"layers\.1\.mlp\.down_proj\.weight has values that are not finite"):
        logits(folder, Shard(1, 2))


def spec(**changes: Any) -> ModelSpec:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 96,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 12,
        "num_key_value_heads": 3,
        "vocab_size": 100,
    }
    return read_spec(config | changes)


def test_shares_of_a_model() -> None:
    half = share_of(spec(num_key_value_heads=4), 2)
    assert (half.num_heads, half.num_kv_heads, half.intermediate_size) == (6, 2, 48)
    assert (half.vocab_size, half.vocab_share, half.num_ranks) == (100, 64, 2)
    assert share_of(spec(num_key_value_heads=2), 4).num_kv_heads == 1
    assert share_of(spec(), 1) == spec()


@pytest.mark.parametrize(
    ("changes", "size", "words"),
    [
        ({}, 5, "tensor_parallel_size 5 does not divide the model's 12 attention heads"),
        ({"intermediate_size": 98}, 3, "tensor_parallel_size 3 does not divide the model's 98 inner dimensions"),
        ({}, 2, "neither divides the model's 3 key and value heads, nor is a multiple of them"),
    ],
)
def test_what_cannot_be_shared_evenly_is_refused(changes: dict[str, int], size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        share_of(spec(**changes), size)


def test_where_shares_begin() -> None:
    starts = [Shard(rank, 4).start(Split.OUTPUTS, 64, 16) for rank in range(4)]
    assert starts == [0, 16, 32, 48]
    assert [Shard(rank, 4).start(Split.OUTPUTS, 32, 16) for rank in range(4)] == [0, 0, 16, 16]
    assert [Shard(rank, 2).start(Split.VOCABULARY, 100, 64) for rank in range(2)] == [0, 64]

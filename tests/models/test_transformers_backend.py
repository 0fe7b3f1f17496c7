"""What runs through transformers: what is read of it, and what is refused. Parity is in test_parity.py."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aserve.core.errors import CheckpointError
from aserve.kernels.reference import ReferenceOps
from aserve.models.checkpoint import resolve_checkpoint
from aserve.models.interface import CausalLM
from aserve.models.loader import load_model
from tests.checkpoints import CONTEXT_LEN, SHAPE, VOCAB_SIZE
from tests.models.paged import PagedSequences

pytestmark = pytest.mark.torch


def load(folder: Path, **options: Any) -> CausalLM:
    return load_model(resolve_checkpoint(str(folder)), device="cpu", ops=ReferenceOps(), **options)


def config_folder(folder: Path, architecture: str, model_type: str, **changes: Any) -> Path:
    """A folder with a config alone, for random weights."""
    folder.mkdir(exist_ok=True)
    config = SHAPE | {"architectures": [architecture], "model_type": model_type} | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_spec_is_measured(checkpoints):
    spec = load(checkpoints("gemma2")).spec
    assert spec.architecture == "Gemma2ForCausalLM"
    assert spec.windows == (24, None)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 4, 2, 16)
    assert (spec.vocab_size, spec.context_len, spec.hidden_size) == (VOCAB_SIZE, CONTEXT_LEN, 32)
    assert spec.tie_embeddings


def test_the_context_ends_where_rotary_frequencies_would_depend_on_the_neighbours(tmp_path):
    rope = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    folder = config_folder(
        tmp_path / "phi3", "Phi3ForCausalLM", "phi3", rope_scaling=rope, original_max_position_embeddings=64
    )
    assert load(folder, load_format="dummy").spec.context_len == 64


def test_dummy_weights_follow_the_seed_and_leave_torchs_generator_alone(tmp_path):
    folder = config_folder(tmp_path / "opt", "OPTForCausalLM", "opt", ffn_dim=48, word_embed_proj_dim=32)
    state = torch.random.get_rng_state()
    models = [load(folder, load_format="dummy", seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(torch.random.get_rng_state(), state)
    first, again, other = (PagedSequences(model).run([(0, [1, 2, 3])])[0] for model in models)
    assert first.abs().min() > 0
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_bfloat16(checkpoints):
    model = load(checkpoints("gpt2"), dtype="bfloat16")
    exact = PagedSequences(load(checkpoints("gpt2")))
    cache = PagedSequences(model, dtype=torch.bfloat16)
    torch.testing.assert_close(cache.run([(0, [1, 2, 3])])[0], exact.run([(0, [1, 2, 3])])[0], atol=0.2, rtol=0.05)


def test_a_missing_tensor_is_named(checkpoints, tmp_path):
    (tmp_path / "config.json").write_text((checkpoints("olmo2") / "config.json").read_text())
    tensors = load_file(checkpoints("olmo2") / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing_keys model\.norm\.weight"):
        load(tmp_path)


MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("architecture", "model_type", "changes", "reason"),
    [
        ("FalconForCausalLM", "falcon", {}, "does not attend by interface"),
        ("BloomForCausalLM", "bloom", {}, "does not attend by interface"),
        ("StableLmForCausalLM", "stablelm", {}, "does not attend by interface"),
        ("MambaForCausalLM", "mamba", {}, "does not attend by interface"),
        ("GptOssForCausalLM", "gpt_oss", {"head_dim": 16, "rope_scaling": None, **MOE}, "its attention has s_aux"),
        ("DogeForCausalLM", "doge", {}, "makes an attention mask of its own"),
        ("BertLMHeadModel", "bert", {}, "its attention is not causal"),
        ("DiffLlamaForCausalLM", "diffllama", {}, "of 2 layers 4 attend"),
        (
            "MoshiForCausalLM",
            "moshi",
            {"sliding_window": 24, "head_dim": 8, "ffn_dim": 48},
            "neither its mask nor its call|not handed forward's keyword arguments",  # in transformers 5.17
        ),
        (
            "Llama4ForCausalLM",
            "llama4_text",
            {"attention_chunk_size": 24, "head_dim": 8, **MOE},
            "layer 0 has chunked_att",
        ),
        ("Lfm2ForCausalLM", "lfm2", {"layer_types": ["full_attention", "conv"]}, "of 2 layers 1 attend"),
        ("NemotronForCausalLM", "nemotron", {}, "NemotronAttention .* is not handed forward's keyword arguments"),
        ("Gemma3ForCausalLM", "gemma3_text", {"use_bidirectional_attention": True}, "its attention is not causal"),
        ("NobodysForCausalLM", "llama", {}, "neither aserve nor transformers .* knows it"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of transformers, about configs that are no model's
def test_what_cannot_be_paged_is_refused_in_one_line(tmp_path, architecture, model_type, changes, reason):
    folder = config_folder(tmp_path / model_type, architecture, model_type, **changes)
    with pytest.raises(CheckpointError, match=reason) as caught:
        load(folder, load_format="dummy")
    assert "\n" not in caught.value.message


def test_a_window_that_only_the_mask_has_is_taken(checkpoints):
    assert load(checkpoints("phimoe")).spec.windows == (24, 24)


def test_latent_attention_is_cached_by_the_larger_of_its_heads(checkpoints):
    assert load(checkpoints("deepseek_v3")).spec.head_dim == 24


@pytest.mark.parametrize(
    ("architecture", "model_type", "changes"),
    [
        ("PhiMoEForCausalLM", "phimoe", MOE),
        ("InternLM3ForCausalLM", "internlm3", {"head_dim": 8, "qkv_bias": False, "bias": False}),
    ],
)
def test_published_names_are_found_by_the_model_type(tmp_path, architecture, model_type, changes):
    pytest.importorskip(f"transformers.models.{model_type}", reason="not yet in transformers 5.17")
    folder = config_folder(tmp_path / model_type, architecture, model_type, **changes)
    assert load(folder, load_format="dummy").spec.architecture == architecture


@pytest.mark.slow
def test_layers_of_different_heads_are_refused(tmp_path):
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16, "head_dim": 8}
    folder = config_folder(tmp_path / "gemma4", "Gemma4ForCausalLM", "gemma4_text", sliding_window=8, **kinds)
    with pytest.raises(CheckpointError, match="its heads differ in size or number"):
        load(folder, load_format="dummy")


def test_loading_restores_transformers_progress_bars(checkpoints, capsys):
    from transformers.utils import logging

    folder = checkpoints("gpt_neox")
    shown = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    capsys.readouterr()
    load(folder)
    assert capsys.readouterr().err == ""
    assert logging.is_progress_bar_enabled()
    if not shown:
        logging.disable_progress_bar()

"""Configs as published, in old and new spellings, and configs that are wrong."""

from typing import Any

import pytest

from aserve.core.errors import CheckpointError
from aserve.models.loader import native_model
from aserve.models.spec import FAMILIES, RopeSpec, read_architecture, read_eos_ids, read_spec

pytestmark = pytest.mark.torch  # formulas load it

LLAMA_31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
QWEN25_05B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 100,
    "max_position_embeddings": 1000,
}
QWEN2 = ["Qwen2ForCausalLM"]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_has_a_formula(architecture):
    assert callable(native_model(architecture))


def test_llama_31():
    spec = read_spec(LLAMA_31_8B)
    assert (spec.head_dim, spec.num_kv_heads, spec.context_len) == (128, 8, 131072)
    assert spec.windows == (None,) * 32
    assert spec.rope == RopeSpec(
        kind="llama3",
        theta=500000.0,
        parameters={
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    )
    assert not any((spec.tie_embeddings, spec.qkv_bias, spec.out_bias, spec.mlp_bias, spec.qk_norm))
    assert spec.kv_bytes_per_token(2) == 2 * 32 * 8 * 128 * 2


def test_qwen25_has_biases_and_switched_off_windows():
    spec = read_spec(QWEN25_05B)
    assert (spec.head_dim, spec.qkv_bias, spec.out_bias, spec.tie_embeddings) == (64, True, False, True)
    assert spec.windows == (None,) * 24


def test_mistral_has_windows_unless_null():
    assert read_spec(MISTRAL_7B).windows == (4096,) * 32
    assert read_spec(MISTRAL_7B | {"sliding_window": None}).windows == (None,) * 32


def test_qwen3_norms_heads_whose_size_is_its_own():
    spec = read_spec(TINY | {"architectures": ["Qwen3ForCausalLM"], "attention_bias": True})
    assert (spec.qk_norm, spec.head_dim, spec.qkv_bias, spec.out_bias) == (True, 128, True, True)


def test_what_is_absent_or_null_takes_the_family_default():
    spec = read_spec(TINY | {"num_key_value_heads": None, "head_dim": None, "rope_scaling": None})
    assert (spec.num_kv_heads, spec.head_dim, spec.norm_eps) == (4, 8, 1e-6)
    assert spec.rope == RopeSpec(kind="default", theta=10000.0)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (None, 8, 8)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, (None, None, None)),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (None, None, None)),
        (
            {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            (8, None, 8),
        ),
    ],
)
def test_switched_windows(config, windows):
    assert read_spec(TINY | {"architectures": QWEN2} | config).windows == windows


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {
            "rope_theta": 5e5,
            "rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 1000},
        },
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "attention_factor": None}},
        {
            "original_max_position_embeddings": 1000,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "truncate": True},
        },
    ],
)
def test_all_spellings_of_yarn_are_one(spelling):
    spec = read_spec(TINY | spelling)
    parameters = {"factor": 4.0, "original_max_position_embeddings": 1000, "truncate": 1.0}
    assert spec.rope == RopeSpec(kind="yarn", theta=5e5, parameters=parameters)
    assert spec.context_len == 4000


@pytest.mark.parametrize(("kind", "context_len"), [("default", 1000), ("linear", 2000), ("dynamic", 2000)])
def test_scaling_by_interpolation_lengthens_the_context(kind, context_len):
    assert read_spec(TINY | {"rope_scaling": {"type": kind, "factor": 2.0}}).context_len == context_len


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": "4096"}, "hidden_size must be an integer"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1, got 0"),
        ({"vocab_size": True}, "vocab_size must be an integer"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"rope_theta": -1}, "rope_theta must be a positive number"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling of type 'longrope'"),
        ({"rope_parameters": {"rope_type": 3}}, "rope_parameters.rope_type must be a string"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"architectures": QWEN2, "layer_types": ["full_attention"]}, "layer_types must name all 3 layers"),
        ({"architectures": QWEN2, "layer_types": ["conv"] * 3}, "layer_types 'conv'"),
    ],
)
def test_a_wrong_value_is_named(change, named):
    with pytest.raises(CheckpointError, match=f"^config.json: {named}"):
        read_spec(TINY | change)


@pytest.mark.parametrize("value", [None, [], [3], "LlamaForCausalLM"])
def test_a_config_without_architecture_is_refused(value):
    with pytest.raises(CheckpointError, match="architectures"):
        read_architecture({"architectures": value})


@pytest.mark.parametrize(
    ("config", "generation_config", "expected"),
    [
        ({"eos_token_id": 2}, {}, {2}),
        ({"eos_token_id": 2}, {"eos_token_id": [3, 4]}, {3, 4}),
        ({"eos_token_id": [2, 5]}, {"eos_token_id": None}, {2, 5}),
        ({}, {}, set()),
    ],
)
def test_eos_ids_are_the_generation_configs_then_the_configs(config, generation_config, expected):
    assert read_eos_ids(config, generation_config) == expected


def test_a_wrong_eos_id_names_its_file():
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
        read_eos_ids({}, {"eos_token_id": "</s>"})

"""The tables: their formulas where they are simple, and transformers' frequencies for every kind."""

import math
from typing import Any

import pytest
import torch

from aserve.models.rope import rope_table
from aserve.models.spec import RopeSpec, read_rope

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
HEAD_DIM = 16
TRAINED_LEN = 64
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

VARIANTS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "original_max_position_embeddings": 48, **LLAMA3},
    {"rope_type": "llama3", "original_max_position_embeddings": 8192, **LLAMA3},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "beta_fast": 16.0, "beta_slow": 2.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "truncate": False},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "attention_factor": 0.75},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 64},
]


def table(spec: RopeSpec, num_positions: int = 2 * TRAINED_LEN) -> torch.Tensor:
    return rope_table(spec, HEAD_DIM, num_positions, CPU)


def test_the_default_turns_pair_i_by_position_over_theta_to_the_2i_over_d():
    cos_sin_LD = table(RopeSpec(kind="default", theta=10000.0), 5)
    assert cos_sin_LD.shape == (5, HEAD_DIM)
    assert cos_sin_LD.dtype == torch.float32
    angle = 3 / 10000 ** (2 * 5 / HEAD_DIM)
    assert cos_sin_LD[3, 5].item() == pytest.approx(math.cos(angle))
    assert cos_sin_LD[3, HEAD_DIM // 2 + 5].item() == pytest.approx(math.sin(angle))


def test_linear_is_the_default_at_position_over_factor():
    linear = table(RopeSpec(kind="linear", theta=10000.0, parameters={"factor": 4.0}))
    torch.testing.assert_close(linear[::4], table(RopeSpec(kind="default", theta=10000.0))[: TRAINED_LEN // 2])


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant["rope_type"])
def test_frequencies_are_those_of_transformers(variant):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_theta": 10000.0, **variant}
    config = LlamaConfig(
        hidden_size=HEAD_DIM, num_attention_heads=1, max_position_embeddings=TRAINED_LEN, rope_parameters=parameters
    )
    frequencies_D2, scale = ROPE_INIT_FUNCTIONS[variant["rope_type"]](config, CPU)
    angles_LD2 = torch.arange(2 * TRAINED_LEN)[:, None] * frequencies_D2
    expected = torch.cat((angles_LD2.cos(), angles_LD2.sin()), dim=-1) * scale
    spec = read_rope({"rope_parameters": parameters}, TRAINED_LEN, HEAD_DIM)
    torch.testing.assert_close(table(spec), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("position", [TRAINED_LEN, TRAINED_LEN + 1, 2 * TRAINED_LEN - 1])
def test_dynamic_takes_the_length_that_each_position_makes(position):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config = LlamaConfig(
        hidden_size=HEAD_DIM,
        num_attention_heads=1,
        max_position_embeddings=TRAINED_LEN,
        rope_parameters=dict(parameters),
    )
    frequencies_D2, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, CPU, seq_len=position + 1)
    spec = read_rope({"rope_parameters": parameters}, TRAINED_LEN, HEAD_DIM)
    torch.testing.assert_close(
        table(spec)[position, : HEAD_DIM // 2], (position * frequencies_D2).cos(), atol=1e-5, rtol=1e-5
    )


def test_dynamic_is_the_default_within_the_original_length_and_never_depends_on_the_table():
    dynamic = read_rope({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, TRAINED_LEN, HEAD_DIM)
    torch.testing.assert_close(table(dynamic, 100), table(dynamic, 300)[:100])
    default = table(RopeSpec(kind="default", theta=10000.0), TRAINED_LEN)
    torch.testing.assert_close(table(dynamic, TRAINED_LEN), default)

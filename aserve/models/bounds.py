"""What a config.json may ask for, whatever the architecture: sane bounds of its numbers and of its nesting.

Checked before anything is computed from them, so that a hostile config costs no more than reading it. Pure: no torch,
no file, no transformers. Does not know what an architecture needs (spec.py), nor whether the weights agree
(inspection.py).
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from aserve.core.errors import CheckpointError

MAX_DEPTH: Final = 16
"""Objects and lists inside one another."""
MAX_KEY: Final = 200
MAX_CONTEXT: Final = 2**24
"""Positions: 1.6 times the longest context that has been published, Llama 4 Scout's."""

INTEGERS: Final = (-(2**63), 2**63 - 1)
MAX_LAYERS: Final = 2**11
DEPTHS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
WIDTH: Final = (1, 2**18)
INNER_WIDTH: Final = (0, 2**20)
HEADS: Final = (1, 2**12)
HEAD_DIM: Final = (1, 2**12)
EXPERTS: Final = (0, 2**14)
POSITIONS: Final = (1, MAX_CONTEXT)
WINDOW: Final = (-1, 2**31 - 1)
ROPE_SCALE: Final = (1e-6, 1e6)
TOKEN_ID: Final = (-1, 2**31 - 1)

LIMITS: Final[Mapping[str, tuple[float, float]]] = {
    "vocab_size": (1, 2**24),
    **dict.fromkeys(DEPTHS, (1, MAX_LAYERS)),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim", "embedding_size"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "hidden_dim"), INNER_WIDTH),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), INNER_WIDTH),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), HEAD_DIM),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length"), POSITIONS),
    "original_max_position_embeddings": POSITIONS,
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "attention_window_size"), WINDOW),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq", "global_rope_theta"), (1.0 + 1e-6, 1e15)),
    **dict.fromkeys(("factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"), ROPE_SCALE),
    **dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim"), (0, 1e4)),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"), (0, 1.0)),
    **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"), TOKEN_ID),
}
"""Lowest and highest value by key, at any depth. Null stands for a default, and is none of this module's business."""

COUNTS_LAYERS: Final = re.compile(r"(^|_)(layers?|depth|blocks)$")
"""Ends of other keys that count layers or name one (decoder_layers, max_window_layers)."""


def check_numbers(config: Mapping[str, Any]) -> None:
    """Raise `CheckpointError`, naming the key, for a number out of bounds or a config that is nested too deeply."""
    for path, key, value in walk(config):
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        low, high = _limits(key, value)
        if not low <= value <= high:
            given = (
                f"an integer of {value.bit_length()} bits" if abs(value) > 2**64 and isinstance(value, int) else value
            )
            raise CheckpointError(f"config.json: {path} must be in [{low:.9g}, {high:.9g}], got {given}")


def walk(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Every value in a config, objects and lists too: its path ("rope_scaling.factor"), its key and itself.

    The items of a list have the list's path and key. Raises `CheckpointError` for a config that is nested too deeply.
    """
    pending: list[tuple[int, str, str, Any]] = [(1, "", key, value) for key, value in [*config.items()][::-1]]
    while pending:
        depth, parent, key, value = pending.pop()
        if not key.isprintable() or len(key) > MAX_KEY:
            raise CheckpointError(f"config.json: {key[:40]!a}... is no key of at most {MAX_KEY} printable characters")
        path = f"{parent}.{key}" if parent else key
        yield path, key, value
        if not isinstance(value, dict | list):
            continue
        if depth == MAX_DEPTH:
            raise CheckpointError(f"config.json: {path[:80]} is nested in {depth} levels; fewer than that are allowed")
        if isinstance(value, dict):
            pending += [(depth + 1, path, name, item) for name, item in [*value.items()][::-1]]
        else:
            pending += [(depth + 1, parent, key, item) for item in reversed(value)]


def _limits(key: str, value: float) -> tuple[float, float]:
    if key in LIMITS:
        return LIMITS[key]
    if COUNTS_LAYERS.search(key):
        return -MAX_LAYERS, MAX_LAYERS  # negative ones count from the last (vision_feature_layer)
    return INTEGERS if isinstance(value, int) else (-math.inf, math.inf)

"""Tiny random checkpoints, saved by transformers, with a tokenizer and a chat template. For tests of all floors.

`checkpoints` is a session fixture: `checkpoints("llama")` is the folder of RECIPES["llama"], written once a session.
A test package gets it by importing it in its conftest.py. `write_checkpoint` makes variants.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGED_WORDS = ("hello", "world", "the", "and", "question", "answer", "assistant", "user", "system")
VOCAB_SIZE = 320
CONTEXT_LEN = 512
EOS_ID = 258
"""<|im_end|>: 256 bytes, then the special tokens."""

WHOLE_PANELS = 64
"""An intermediate size for which gates are applied within our own product on a CPU; others behind it, with AVX-512."""

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LEN,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": EOS_ID,
    "tie_word_embeddings": False,
}

RECIPES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama_biases": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 4,
        "intermediate_size": WHOLE_PANELS,
    },
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 16},
    "llama3": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama_linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
    "llama_dynamic": {
        "model_type": "llama",
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    },
    "llama_yarn": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"model_type": "mistral", "sliding_window": 24},
    "qwen2": {"model_type": "qwen2"},
    "qwen2_tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_windows": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "intermediate_size": WHOLE_PANELS, "head_dim": 16},
    "opt": {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "tie_word_embeddings": True},
    "gemma": {"model_type": "gemma", "head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "sliding_window": 24,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 24,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
    },
    "phi3": {"model_type": "phi3", "sliding_window": 24},
    "gpt_neox": {"model_type": "gpt_neox"},
    "phi": {"model_type": "phi"},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "cohere": {"model_type": "cohere", "logit_scale": 0.25, "tie_word_embeddings": True},
    "olmo2": {"model_type": "olmo2"},
    "starcoder2": {"model_type": "starcoder2"},
    "phimoe": {"model_type": "phimoe", "sliding_window": 24, "num_local_experts": 4},
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "granite": {"model_type": "granite", "logits_scaling": 3.0, "residual_multiplier": 0.5},
}
NATIVE_RECIPES = tuple(name for name in RECIPES if name.startswith(("llama", "mistral", "qwen")))
BACKEND_RECIPES = tuple(name for name in RECIPES if name not in NATIVE_RECIPES)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """recipe name -> folder of that checkpoint, the same one all session; do not write to it."""
    root = tmp_path_factory.mktemp("checkpoints")

    def checkpoint(name: str) -> Path:
        folder = root / name
        return folder if folder.is_dir() else write_checkpoint(folder, name)

    return checkpoint


def write_checkpoint(folder: Path, recipe: str, *, seed: int = 0, max_shard_size: str = "1GB", **changes: Any) -> Path:
    """Save RECIPES[recipe], with `changes` to its config, as a float32 checkpoint in folder; returns the folder.

    Every parameter is random, biases and norms too, so that a forgotten one shows; large enough that greedy choices
    differ clearly.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.for_model(**(SHAPE | RECIPES[recipe] | changes))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
                else:
                    parameter.copy_(0.25 * torch.randn_like(parameter))
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template, which tokenizer_config.json holds."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": CONTEXT_LEN,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE: ids 0 to 255 are the bytes, 256 to 258 the special tokens, then a few merged words."""
    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    vocab |= {token: 256 + i for i, token in enumerate(SPECIAL_TOKENS)}
    merges: list[tuple[str, str]] = []
    for word in MERGED_WORDS:
        for end in range(2, len(word) + 1):
            pair = (word[: end - 1], word[end - 1])
            if word[:end] not in vocab:
                merges.append(pair)
                vocab[word[:end]] = len(vocab)
    assert len(vocab) <= VOCAB_SIZE
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def _byte_symbols() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]

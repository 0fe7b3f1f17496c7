"""Tiny random checkpoints of models that pool, as transformers and sentence-transformers save them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import processors

from tests.checkpoints import CONTEXT_LEN, EOS_ID, SHAPE, build_tokenizer, write_tokenizer

START_ID = 257
ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": SHAPE["vocab_size"],
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "bos_token_id": START_ID,
    "eos_token_id": EOS_ID,
}
MODERN: dict[str, Any] = {
    **ENCODER,
    "global_attn_every_n_layers": 2,
    "local_attention": 16,
    "num_hidden_layers": 3,
    "cls_token_id": START_ID,
    "sep_token_id": EOS_ID,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", **ENCODER},
    "xlm-roberta": {"model_type": "xlm-roberta", "type_vocab_size": 1, **ENCODER},
    "roberta": {"model_type": "roberta", "type_vocab_size": 1, **ENCODER},
    "distilbert": {"model_type": "distilbert", **ENCODER, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "electra": {"model_type": "electra", "embedding_size": 16, **ENCODER},
    "mpnet": {"model_type": "mpnet", **ENCODER},
    "camembert": {"model_type": "camembert", "type_vocab_size": 1, **ENCODER},
    "modernbert": {"model_type": "modernbert", **MODERN},
    "llama": {**SHAPE, "model_type": "llama"},
    "mistral": {**SHAPE, "model_type": "mistral", "sliding_window": 24},
    "qwen2": {**SHAPE, "model_type": "qwen2"},
    "qwen3": {**SHAPE, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "gemma2": {
        **SHAPE,
        "model_type": "gemma2",
        "head_dim": 16,
        "sliding_window": 24,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
    },
}


def write_pooling(
    folder: Path,
    recipe: str,
    auto: str = "AutoModel",
    *,
    method: str | None = None,
    dense: int = 0,
    normalizes: bool = True,
    brackets: bool = False,
    **changes: Any,
) -> Path:
    """Save CONFIGS[recipe], with `changes`, as the class `auto` has it.

    method: written into modules.json as sentence-transformers does, with a dense layer to `dense` numbers unless 0;
    None writes none. brackets: the tokenizer puts special tokens around texts, and tells two texts apart.
    """
    import transformers

    config = transformers.AutoConfig.for_model(**(CONFIGS[recipe] | changes))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = getattr(transformers, auto).from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.15 * torch.randn_like(parameter))
        linear = torch.nn.Linear(32, dense or 1)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    if brackets:
        _put_brackets(folder)
    if method is not None:
        _write_modules(folder, method, linear if dense else None, normalizes=normalizes)
    return folder


def _put_brackets(folder: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        pair="<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1",
        special_tokens=[("<|im_start|>", START_ID), ("<|im_end|>", EOS_ID)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def _write_modules(folder: Path, method: str, linear: torch.nn.Linear | None, *, normalizes: bool) -> None:
    kinds = [
        "Transformer",
        "Pooling",
        *(["Dense"] if linear is not None else []),
        *(["Normalize"] if normalizes else []),
    ]
    modules = []
    for index, kind in enumerate(kinds):
        path = "" if kind == "Transformer" else f"{index}_{kind}"
        modules.append({"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"})
        if path:
            (folder / path).mkdir()
    (folder / "modules.json").write_text(json.dumps(modules))
    names = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}
    flags = {f"pooling_mode_{name}": kind == method for kind, name in names.items()}
    pooling = {"word_embedding_dimension": 32, "pooling_mode_max_tokens": False, **flags}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": min(CONTEXT_LEN, 120)}))
    if linear is not None:
        place = folder / "2_Dense"
        activation = "torch.nn.modules.activation.Tanh"
        shape = {"in_features": 32, "out_features": linear.out_features, "bias": True}
        (place / "config.json").write_text(json.dumps({**shape, "activation_function": activation}))
        tensors = {"linear.weight": linear.weight.detach(), "linear.bias": linear.bias.detach()}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, place / "model.safetensors")

"""Two checkpoints of random weights, to compare servers with: nothing is downloaded, and what they say means nothing.

q05   the shape of Qwen2.5-0.5B in bfloat16, with a vocabulary of 32,000 and tied embeddings: 387 million parameters
tiny  a Llama of 5 million parameters in float32, vocabulary 4,096: where everything but the model's arithmetic shows

Each has a byte-level BPE tokenizer of its own, trained on Python's standard library, and a ChatML template.

    python scripts/make_models.py models            # writes models/q05 and models/tiny
    python scripts/make_models.py models --only tiny
"""

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

PAD, START, END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

QWEN2_SPLIT: Final = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How Qwen2 cuts text into words: a splitting that every engine knows."""

CHATML: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

Q05: Final = {
    "vocab_size": 32_000,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
TINY: Final = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
SHAPES: Final[dict[str, tuple[Any, Any, dict[str, Any], torch.dtype]]] = {
    "q05": (Qwen2Config, Qwen2ForCausalLM, Q05, torch.bfloat16),
    "tiny": (LlamaConfig, LlamaForCausalLM, TINY, torch.float32),
}


def library_texts() -> Iterator[str]:
    """The standard library's sources, without its tests."""
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.rglob("*.py")):
        if not any("test" in part or part == "site-packages" for part in path.relative_to(folder).parts):
            yield path.read_text(encoding="utf-8", errors="replace")


def make_tokenizer(vocab_size: int, max_len: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with this many tokens, the special ones last. max_len: the model's context."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - len(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(library_texts(), trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, additional_special_tokens=[START]
    )
    whole.chat_template, whole.model_max_length = CHATML, max_len
    return whole


def make_model(name: str, folder: Path) -> None:
    """Write one checkpoint. Seed 0: the same weights every time."""
    config_class, model_class, shape, dtype = SHAPES[name]
    tokenizer = make_tokenizer(shape["vocab_size"], shape["max_position_embeddings"])
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    model = model_class(config_class(**shape, **ends, dtype=dtype)).to(dtype)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{folder / name}: {num_parameters / 1e6:.1f} million parameters, {dtype}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=list(SHAPES))
    args = parser.parse_args()
    for name in [args.only] if args.only else SHAPES:
        make_model(name, args.folder)


if __name__ == "__main__":
    main()

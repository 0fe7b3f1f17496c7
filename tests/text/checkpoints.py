"""Small real tokenizers, of the two kinds that language models have, trained in a few milliseconds."""

from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers

from aserve.text.tokenizer import Tokenizer
from aserve.text.tokenizer_config import TokenizerConfig

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "Il était une fois un café où l'on servait des tokens.",
    "你好,世界。今天天气很好。",
    "Emoji: 🤖👩‍👩‍👧🏳️‍🌈 and combining marks: e\u0301 n\u0303 a\u0323\u0302",
    "def add(a, b):\n    return a + b\n\n",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}


def byte_level_backend() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen. By id: the special tokens, the 256 bytes, merges, two added."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{L}+| ?[^\s\p{L}]+|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.add_tokens([AddedToken("<工 具>", normalized=False), AddedToken("<tool>", normalized=False)])
    return backend


def sentencepiece_backend() -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral: "▁" for a space, unknown characters as bytes, a bos put before a text."""
    alphabet = sorted({char for sentence in SENTENCES[:1] for char in sentence.replace(" ", "▁")})
    words = ["▁t", "he", "▁the", "▁d", "og", "▁dog", "▁f", "ox", "▁fox"]
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *alphabet, *words]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "d"), ("o", "g"), ("▁d", "og"), ("▁", "f"), ("o", "x")]
    merges.append(("▁f", "ox"))
    backend = tokenizers.Tokenizer(
        models.BPE({piece: n for n, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIAL)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def config(**fields: object) -> TokenizerConfig:
    """A TokenizerConfig with NAMED tokens and nothing else, but for `fields`."""
    values = {"named_tokens": NAMED, "special_tokens": (), "added_tokens": (), "templates": {}}
    return TokenizerConfig(**(values | fields))


def byte_level() -> Tokenizer:
    return Tokenizer(byte_level_backend(), config())


def sentencepiece() -> Tokenizer:
    return Tokenizer(sentencepiece_backend(), config())


def write(folder: Path, backend: tokenizers.Tokenizer, **files: str) -> Path:
    """A checkpoint folder with tokenizer.json and `files`; a name's "__" stands for the dot before its suffix."""
    backend.save(str(folder / "tokenizer.json"))
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder

"""A tokenizer for random weights: every id of a vocabulary has a text, so that every token is an event of a stream."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def write_words(folder: Path, model: Path) -> Path:
    """Write tokenizer.json into the folder, for the vocabulary of a folder with a config.json: bytes, then words."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{number}" for number in range(config["vocab_size"] - len(alphabet))]
    tokenizer = Tokenizer(models.BPE({text: number for number, text in enumerate(alphabet + words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder

"""A fingerprint of a model's files: whether a replay computes with the weights that were recorded."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

SAMPLE_BYTES: Final = 2**20
"""Read of each file of weights, at its beginning, in its middle and at its end: a large one takes minutes to read."""


def fingerprint(config: Mapping[str, Any], weight_files: Sequence[Path]) -> str:
    """Of config.json and of samples of the weights: 16 hexadecimal digits. Raises OSError."""
    digest = hashlib.sha256(msgspec.json.encode(config, order="sorted"))
    for path in sorted(weight_files, key=lambda path: path.name):
        size = path.stat().st_size
        digest.update(b"%s %d " % (path.name.encode(), size))
        with path.open("rb") as file:
            for start in (0, size // 2, max(0, size - SAMPLE_BYTES)):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]

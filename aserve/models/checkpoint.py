"""A checkpoint: a folder of config.json, safetensors and tokenizer.json, local or from the Hugging Face hub.

Knows which files a servable folder has, and refuses what would run code: pickled weights, and configs that name code.
Refuses too what no honest folder has: numbers out of all bounds, huge files of text, links that lead out of it. Does
not know what the config means (spec.py), whether the weights agree (inspection.py), or read a tensor (weights.py).
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from aserve.core.errors import CheckpointError
from aserve.core.foreign import first_line
from aserve.models.bounds import check_numbers, walk
from aserve.models.spec import read_eos_ids

INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"
PICKLED: Final = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
DOWNLOADED: Final = ("*.json", "*.safetensors", "*.jinja", "tokenizer*")
TOKENIZER_FILES: Final = ("*.jinja", "tokenizer*", "special_tokens_map.json")
# Sub-folders hold other formats (onnx/, original/), but for those of sentence-transformers (1_Pooling/, 2_Dense/);
# consolidated* are the same weights under other names.
NOT_DOWNLOADED: Final = ("[!0-9]*/*", "*/*/*", "consolidated*")

MiB: Final = 2**20
MAX_BYTES: Final[Mapping[str, int]] = {
    "tokenizer.json": 128 * MiB,
    "tokenizer*": 16 * MiB,
    INDEX_FILE: 64 * MiB,
    "*.json": MiB,
    "*.jinja": MiB,
    "additional_chat_templates/*.jinja": MiB,
    "[0-9]*_*/*.json": MiB,
}
"""Of the files that are read whole. The first pattern counts; Gemma 3's tokenizer.json has 32 MiB."""
LINKED: Final = ("*.safetensors", "additional_chat_templates", "[0-9]*_*", "[0-9]*_*/*.safetensors")
"""What may be a link no more than those, and has no bound."""
MAX_INDEX_ENTRIES: Final = 2**19


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder that passed inspection. weight_files: every shard, all present; empty where only a config is there.

    pools: its hidden states alone are wanted: an output head is left out, and names of tensors may do without "model.".
    """

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    weight_files: tuple[Path, ...]
    has_tokenizer: bool
    pools: bool = False

    @property
    def eos_ids(self) -> frozenset[int]:
        """Token ids that end an answer."""
        return read_eos_ids(self.config, self.generation_config)


def resolve_checkpoint(
    model: str,
    revision: str | None = None,
    download_dir: str | None = None,
    trust_remote_code: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """A local folder, or an id from the hub's cache or the hub itself (never the network under HF_HUB_OFFLINE).

    revision and download_dir are the hub's. overrides: replace fields of config.json. Raises `CheckpointError`, one
    line, for a model that is missing, holds pickled weights only, lacks a shard, or asks to run code without
    trust_remote_code.
    """
    path = _find_folder(model, revision, download_dir, DOWNLOADED)
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{model}: there is no config.json, so this is not a model folder")

    config = read_object(path / "config.json") | dict(overrides or {})
    check_numbers(config)
    if not trust_remote_code:
        _refuse_code(model, config)
    generation_config_path = path / "generation_config.json"
    return Checkpoint(
        path=path,
        config=config,
        generation_config=read_object(generation_config_path) if generation_config_path.is_file() else {},
        weight_files=_find_weights(path),
        has_tokenizer=(path / "tokenizer.json").is_file(),
    )


def resolve_tokenizer(name: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """The folder of a tokenizer that is named apart from the model; of an id only its own files are fetched.

    Raises `CheckpointError` where there is none.
    """
    path = _find_folder(name, revision, download_dir, TOKENIZER_FILES)
    if not (path / "tokenizer.json").is_file():
        raise CheckpointError(f"{name}: there is no tokenizer.json")
    return path


def _find_folder(name: str, revision: str | None, download_dir: str | None, patterns: Sequence[str]) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        _check_files(path)
        return path
    if path.is_file():
        raise CheckpointError(f"{name}: this is a file; a model is a folder with config.json and *.safetensors")
    if path.exists() or path.is_absolute() or name.count("/") > 1 or name.startswith((".", "~")):
        raise CheckpointError(f"{name}: no such folder")
    path = _download(name, revision, download_dir, patterns)
    _check_files(path)
    return path


def _check_files(folder: Path) -> None:
    """Refuse huge files of text, and links out of the folder: what they lead to could be shown to whoever asks.

    The hub's cache consists of links, snapshots/<commit>/<file> to blobs/<hash>; those are as good as the file.
    """
    real = folder.resolve()
    inside = (real, real.parent.parent / "blobs") if real.parent.name == "snapshots" else (real,)
    seen: set[Path] = set()
    for pattern, max_bytes in {**MAX_BYTES, **dict.fromkeys(LINKED)}.items():
        for path in set(folder.glob(pattern)) - seen:
            seen.add(path)
            target = Path(os.path.realpath(path))  # which takes a link to itself as it is
            if not any(target.is_relative_to(place) for place in inside):
                raise CheckpointError(
                    f"{path}: a link to {target}, which is outside the folder; put the file itself there"
                )
            if max_bytes is not None and path.is_file() and path.stat().st_size > max_bytes:
                raise CheckpointError(f"{path}: {path.stat().st_size} bytes; at most {max_bytes} are read")


def _download(model: str, revision: str | None, download_dir: str | None, patterns: Sequence[str]) -> Path:
    # Imported here: a local folder need not wait for it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    # Of whichever HTTP client this version of the hub uses:
    from huggingface_hub.errors import HTTPError as BrokenConnectionError  # type: ignore[attr-defined]

    at = f" at revision {revision}" if revision else ""
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=list(patterns),
            ignore_patterns=list(NOT_DOWNLOADED),
        )
    except GatedRepoError as error:
        raise CheckpointError(f"{model}: access is restricted; accept its terms on the hub and log in") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"{model}{at}: neither a local folder nor a model on the hub") from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{model}{at}: not a local folder, not in the cache, and the hub cannot be reached (or is switched off)"
        ) from error
    except (OSError, ValueError, BrokenConnectionError) as error:
        raise CheckpointError(f"{model}{at}: cannot be downloaded: {first_line(error)}") from error
    return Path(folder)


def read_object(path: Path, kind: type[dict[str, Any]] | type[list[Any]] = dict) -> Any:
    """A JSON file that holds an object, or a list of objects. Raises `CheckpointError` for any other."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {first_line(error)}") from error
    items = value if isinstance(value, list) else ()
    if not isinstance(value, kind) or not all(isinstance(item, dict) for item in items):
        raise CheckpointError(f"{path}: must hold a JSON {'object' if kind is dict else 'list of objects'}")
    return value


def _refuse_code(model: str, config: Mapping[str, Any]) -> None:
    """Refuse keys by which a config makes transformers import code, from the folder or from the hub."""
    for _, key, value in walk(config):
        if key == "auto_map" or (key == "trust_remote_code" and value):
            raise CheckpointError(
                f"{model}: config.json asks to run the model's own code ({key}); see --trust-remote-code"
            )
        if key.startswith(("_attn_implementation", "_experts_implementation")) and "/" in str(value):
            raise CheckpointError(
                f"{model}: config.json asks to run code from the hub ({key}); see --trust-remote-code"
            )


def _find_weights(path: Path) -> tuple[Path, ...]:
    index = path / INDEX_FILE
    if index.is_file():
        return _find_shards(path, index)
    if (path / SINGLE_FILE).is_file():
        return (path / SINGLE_FILE,)
    others = sorted(file.name for file in path.glob("*.safetensors"))
    if others:
        raise CheckpointError(f"{path}: {others[0]} is there, but neither {SINGLE_FILE} nor {INDEX_FILE}")
    pickled = sorted(file.name for pattern in PICKLED for file in path.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"{path}: {pickled[0]} is refused, because a pickle can run code; convert the weights to safetensors"
        )
    return ()


def _find_shards(path: Path, index: Path) -> tuple[Path, ...]:
    content = index.read_bytes()
    num_entries = content.count(b":")
    if num_entries > MAX_INDEX_ENTRIES:
        raise CheckpointError(f"{index}: {num_entries} entries; at most {MAX_INDEX_ENTRIES} are read")
    try:
        names = set(msgspec.json.decode(content, type=_Index).weight_map.values())
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{index}: weight_map must map tensors to file names: {error}") from error
    if not names:
        raise CheckpointError(f"{index}: weight_map must map tensors to file names, and maps none")
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors") or not name.isprintable():
            raise CheckpointError(
                f"{index}: weight_map must map to .safetensors files in the folder, got {name[:80]!a}"
            )
    shards = tuple(path / name for name in sorted(names))
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise CheckpointError(f"{path}: {len(missing)} of {len(shards)} shards are missing, the first is {missing[0]}")
    return shards


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]

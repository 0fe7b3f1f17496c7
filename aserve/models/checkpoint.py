"""A checkpoint: a folder of config.json, safetensors and tokenizer.json, local or from the Hugging Face hub.

Knows which files a servable folder has, and refuses what would run code: pickled weights, and configs that name code.
Does not know what the config means (spec.py) or read a tensor (weights.py).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aserve.core.errors import CheckpointError
from aserve.models.spec import read_eos_ids

INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"
PICKLED: Final = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
DOWNLOADED: Final = ("*.json", "*.safetensors", "*.jinja", "tokenizer*")
TOKENIZER_FILES: Final = ("*.jinja", "tokenizer*", "special_tokens_map.json")
# Sub-folders hold other formats (onnx/, original/), consolidated* the same weights under other names.
NOT_DOWNLOADED: Final = ("*/*", "consolidated*")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder that passed inspection. weight_files: every shard, all present; empty where only a config is there."""

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    weight_files: tuple[Path, ...]
    has_tokenizer: bool

    @property
    def eos_ids(self) -> frozenset[int]:
        """Token ids that end an answer."""
        return read_eos_ids(self.config, self.generation_config)


def resolve_checkpoint(
    model: str, revision: str | None = None, download_dir: str | None = None, trust_remote_code: bool = False
) -> Checkpoint:
    """A local folder, or an id from the hub's cache or the hub itself (never the network under HF_HUB_OFFLINE).

    revision and download_dir are the hub's. Raises `CheckpointError`, one line, for a model that is missing, holds
    pickled weights only, lacks a shard, or asks to run code without trust_remote_code.
    """
    path = _find_folder(model, revision, download_dir, DOWNLOADED)
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{model}: there is no config.json, so this is not a model folder")

    config = _read_object(path / "config.json")
    if not trust_remote_code:
        _refuse_code(model, config)
    generation_config_path = path / "generation_config.json"
    return Checkpoint(
        path=path,
        config=config,
        generation_config=_read_object(generation_config_path) if generation_config_path.is_file() else {},
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
        return path
    if path.exists() or path.is_absolute() or name.count("/") > 1 or name.startswith((".", "~")):
        raise CheckpointError(f"{name}: no such folder")
    return _download(name, revision, download_dir, patterns)


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
        raise CheckpointError(f"{model}{at}: cannot be downloaded: {_first_line(error)}") from error
    return Path(folder)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {_first_line(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return value


def _refuse_code(model: str, config: Mapping[str, Any]) -> None:
    """Refuse keys by which a config makes transformers import code, from the folder or from the hub."""
    for key, value in _walk(config):
        if key == "auto_map" or (key == "trust_remote_code" and value):
            raise CheckpointError(
                f"{model}: config.json asks to run the model's own code ({key}); see --trust-remote-code"
            )
        if key.startswith(("_attn_implementation", "_experts_implementation")) and "/" in str(value):
            raise CheckpointError(
                f"{model}: config.json asks to run code from the hub ({key}); see --trust-remote-code"
            )


def _walk(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        yield key, value
        if isinstance(value, dict):
            yield from _walk(value)


def _find_weights(path: Path) -> tuple[Path, ...]:
    index = path / INDEX_FILE
    if index.is_file():
        return _find_shards(path, _read_object(index))
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


def _find_shards(path: Path, index: Mapping[str, Any]) -> tuple[Path, ...]:
    weight_map = index.get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise CheckpointError(f"{path / INDEX_FILE}: weight_map must map tensors to file names in the folder")
    shards = tuple(path / name for name in sorted(names))
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise CheckpointError(f"{path}: {len(missing)} of {len(shards)} shards are missing, the first is {missing[0]}")
    return shards

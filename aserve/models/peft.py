"""Adapters as PEFT saves them: a folder with adapter_config.json and adapter_model.safetensors.

    adapter_config.json -> rank, scale, and that nothing else is asked for
    the header of adapter_model.safetensors -> of which linear layers there are factors, and that all shapes fit

Both are checked before a number is read or memory taken, as strictly as a checkpoint is: what would be ignored is
refused by its name. A field that aserve does not know is refused unless it is off. The format is described at
https://huggingface.co/docs/peft/developer_guides/checkpoint. Does not know slots, nor for what a layer is.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import msgspec

from aserve.core.errors import AdapterError, CheckpointError
from aserve.models.headers import TensorHeader, read_header
from aserve.models.sharding import ALONE, Shard, Split

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
MAX_CONFIG_BYTES: Final = 2**20
MAX_SCALE: Final = 1e4
FLOATS: Final = ("F64", "F32", "F16", "BF16")

WITHOUT_EFFECT: Final = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "ephemeral_gpu_offload", "inference_mode", "lora_dropout"),
        *("peft_version", "qalora_group_size", "revision", "runtime_config", "task_type"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),  # the tensors tell
        *("megatron_core", "loftq_config", "eva_config", "ensure_weight_tying"),
    }
)
"""Fields that change nothing about what trained factors do."""
KNOWN: Final = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights"})
KEEPING: Final = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base model's weights as they are."""
_PARTS: Final = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
_PREFIX: Final = "base_model.model."


class Module(NamedTuple):
    """The shape of a linear layer that adapters may change."""

    num_inputs: int
    num_outputs: int


@dataclass(frozen=True, slots=True)
class PeftFolder:
    """An adapter that fits a model. scale: of B. names: for each layer that it changes, its tensors A and B."""

    path: Path
    rank: int
    scale: float
    names: Mapping[str, tuple[str, str]]


def inspect_adapter(path: Path, modules: Mapping[str, Module], max_rank: int) -> PeftFolder:
    """An adapter's folder, checked against the layers of the model. Raises `AdapterError`, a line that names the fault.

    No links lead out of the folder, or they would show files to whoever loads them.
    """
    try:
        if not path.is_dir():
            raise AdapterError(f"{path}: no such folder")
        _check_links(path)
    except OSError as error:  # a folder that nobody may enter, a name that is too long
        raise AdapterError(f"{path}: cannot be read: {error.strerror}") from error
    config = _read_config(path)
    rank = _rank(config, max_rank)
    _refuse_others(config)
    try:
        tensors = read_header(path / WEIGHTS_FILE)
    except CheckpointError as error:
        raise AdapterError(error.message) from error
    names = _names(tensors, modules, rank)
    return PeftFolder(path, rank, _scale(config, rank), names)


def _check_links(path: Path) -> None:
    folder = Path(os.path.realpath(path))
    is_of_hub = folder.parent.name == "snapshots"  # whose files are links to the hub's cache
    inside = (folder, folder.parent.parent / "blobs") if is_of_hub else (folder,)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        target = Path(os.path.realpath(path / name))
        if not any(target.is_relative_to(place) for place in inside):
            raise AdapterError(f"{path}: {name} is a link that leads out of the folder; put the file itself there")
        if not target.is_file():
            raise AdapterError(f"{path}: there is no {name}, so this is not an adapter as PEFT saves it")
    size = (path / CONFIG_FILE).stat().st_size
    if size > MAX_CONFIG_BYTES:
        raise AdapterError(f"{path}: {CONFIG_FILE} has {size} bytes; at most {MAX_CONFIG_BYTES} are read")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = msgspec.json.decode((path / CONFIG_FILE).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterError(f"{path}: {CONFIG_FILE} is no JSON object: {error}") from error
    if config.get("peft_type") != "LORA":
        raise _refusal("peft_type", config.get("peft_type"), "LORA")
    return config


def _rank(config: Mapping[str, Any], max_rank: int) -> int:
    rank = config.get("r")
    if type(rank) is not int or not 1 <= rank <= max_rank:
        raise _refusal("r", rank, f"an integer in [1, {max_rank}] (max_lora_rank)")
    return rank


def _scale(config: Mapping[str, Any], rank: int) -> float:
    """lora_alpha / r, or lora_alpha / sqrt(r) (rsLoRA: Kalajdzievski, arXiv 2312.03732)."""
    alpha, is_rank_stabilized = config.get("lora_alpha"), config.get("use_rslora", False)
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not -MAX_SCALE <= alpha <= MAX_SCALE:
        raise _refusal("lora_alpha", alpha, f"a number in [-{MAX_SCALE:g}, {MAX_SCALE:g}]")
    if type(is_rank_stabilized) is not bool:
        raise _refusal("use_rslora", is_rank_stabilized, "true or false")
    return alpha / (math.sqrt(rank) if is_rank_stabilized else rank)


def _refuse_others(config: Mapping[str, Any]) -> None:
    if config.get("bias", "none") != "none":
        raise _refusal("bias", config["bias"], "none")
    if config.get("init_lora_weights") not in KEEPING:
        raise AdapterError(
            f"{CONFIG_FILE}: init_lora_weights {_shown(config['init_lora_weights'])} changes the base model's weights: "
            "convert the adapter to plain LoRA (PEFT's path_initial_model_for_weight_conversion)"
        )
    for name, value in config.items():
        if value and name not in WITHOUT_EFFECT and name not in KNOWN:
            raise AdapterError(f"{CONFIG_FILE}: {_shown(name)} is not supported, and it is {_shown(value)}")


def _names(tensors: Mapping[str, TensorHeader], modules: Mapping[str, Module], rank: int) -> dict[str, tuple[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for name, header in tensors.items():
        parts = _PARTS.fullmatch(name.removeprefix(_PREFIX))
        module = None if parts is None else modules.get(parts["module"])
        if parts is None or module is None:
            raise AdapterError(f"tensor {name} {_why_not(name)}")
        factor = parts["factor"]
        shape = (rank, module.num_inputs) if factor == "A" else (module.num_outputs, rank)
        if header.shape != shape:
            raise AdapterError(f"tensor {name} is {list(header.shape)}, but rank and model ask for {list(shape)}")
        if header.dtype not in FLOATS:
            raise AdapterError(f"tensor {name} has dtype {header.dtype}, not one of {', '.join(FLOATS)}")
        if factor in found.setdefault(parts["module"], {}):
            raise AdapterError(f"tensor {name} is there twice, with and without {_PREFIX}")
        found[parts["module"]][factor] = name
    for module_name, names in found.items():
        if len(names) < 2:
            raise AdapterError(f"{module_name} has lora_{next(iter(names))} and not the other factor")
    if not found:
        raise AdapterError(f"{WEIGHTS_FILE} has no tensor")
    return {module_name: (names["A"], names["B"]) for module_name, names in found.items()}


def _why_not(name: str) -> str:
    if "embed" in name or "lm_head" in name:
        return "changes embeddings or the output head, which is not supported: linear layers of the decoder are"
    if "magnitude" in name:
        return "is DoRA's, which is not supported"
    return "has no place in this model: it is no lora_A or lora_B of one of its linear layers"


def _refusal(field: str, value: object, allowed: str) -> AdapterError:
    return AdapterError(f"{CONFIG_FILE}: {field} must be {allowed}, got {_shown(value)}")


def _shown(value: object) -> str:
    return ascii(value)[:80]


class PeftReader:
    """Reads the tensors of an inspected adapter. A context manager: leaving it closes the file. shard: whose share.

    The file is not mapped into memory: where somebody copied another over it meanwhile, the process would end.
    """

    def __init__(self, folder: PeftFolder, shard: Shard = ALONE) -> None:
        self._folder = folder
        self._shard = shard
        path = folder.path / WEIGHTS_FILE
        try:
            self._headers = read_header(path)
            self._file = path.open("rb")
        except CheckpointError as error:
            raise AdapterError(error.message) from error
        except OSError as error:
            raise AdapterError(f"{path}: cannot be read: {error.strerror}") from error

    def __enter__(self) -> Self:
        self._begin = 8 + int.from_bytes(self._file.read(8), "little")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def fill(self, module: str, a_IR: "Tensor", b_RO: "Tensor", split: Split | None = None) -> None:
        """Write a layer's factors, transposed and B scaled; zeros stay where the adapter has none for it.

        split: how ranks share the layer; the factors have room for this one's part.
        """
        if module not in self._folder.names:
            return
        name_a, name_b = self._folder.names[module]
        self._write(name_a, a_IR, 1.0, split if split is Split.INPUTS else None)
        self._write(name_b, b_RO, self._folder.scale, split if split is Split.OUTPUTS else None)

    def _write(self, name: str, out: "Tensor", scale: float, split: Split | None) -> None:
        tensor = self._stored(name)
        if split is not None and self._shard.size > 1:
            share = out.shape[1 - split.dim]  # it is transposed
            start = self._shard.start(split, tensor.shape[split.dim], share)
            tensor = tensor[start : start + share] if split.dim == 0 else tensor[:, start : start + share]
        if tuple(tensor.shape) != tuple(out.shape)[::-1]:
            raise AdapterError(f"tensor {name} is {list(tensor.shape)} now: the file has changed while it was read")
        out.copy_(tensor.t().float() * scale)
        if not out.isfinite().all():
            kind = str(out.dtype).removeprefix("torch.")
            raise AdapterError(f"tensor {name} has values that are not finite in {kind}")

    def _stored(self, name: str) -> "Tensor":
        """A whole tensor as the file has it."""
        import torch

        changed = AdapterError(f"tensor {name} is not there now: the file has changed while it was read")
        header = self._headers.get(name)
        if header is None or header.dtype not in FLOATS:
            raise changed
        start, stop = header.data_offsets
        dtypes = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        self._file.seek(self._begin + start)
        raw = bytearray(self._file.read(stop - start))
        if not raw or len(raw) != stop - start:
            raise changed
        return torch.frombuffer(raw, dtype=dtypes[header.dtype]).view(header.shape)

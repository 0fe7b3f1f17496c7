"""Where weights come from: safetensors shards, read in place, or random numbers.

A model's constructor allocates each parameter and has it filled, so nothing is initialised twice, no half-built model
exists, and a fused parameter is filled slice by slice with the checkpoint's separate tensors. Knows files, names and
shapes; does not know what a tensor is for.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aserve.core.errors import CheckpointError
from aserve.models.dequantize import dequantize
from aserve.models.quantized_formats import QuantizedWeight, biases_of, is_unused
from aserve.models.sharding import ALONE, Shard

ReadProgress = Callable[[str, int, int], None]
"""Called as progress(stage, done, total); loading weights is the stage "weights", counted in bytes of their files."""

FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
COMPUTED: Final = (".rotary_emb.inv_freq",)
"""Ends of names that old checkpoints carry although they follow from the config."""


class Part(NamedTuple):
    """Some of a tensor: from `start` on in one dimension, as much as there is room for."""

    dim: int
    start: int


class Weights(Protocol):
    """A source of weights of one type on one device. shard: whose share is read."""

    shard: Shard

    def empty(self, *shape: int) -> Tensor:
        """A parameter without values yet."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor called name. Raises `CheckpointError` where there is none."""
        ...

    def fill(self, out: Tensor, name: str, part: Part | None = None) -> None:
        """Write the tensor called name into out, which has its shape, or that of the part.

        Raises `CheckpointError` where it does not.
        """
        ...

    def skip(self, name: str) -> None:
        """The checkpoint may carry this tensor; the model needs none of it."""
        ...


class SafetensorsWeights:
    """Weights of a checkpoint's shards, each tensor read once. A context manager: leaving it closes the files.

    Construction raises `CheckpointError` for a file that is no safetensors, or a tensor that two shards have.
    """

    def __init__(
        self,
        files: Sequence[Path],
        dtype: torch.dtype,
        device: torch.device,
        progress: ReadProgress,
        renamed: Mapping[str, str] | None = None,
        shard: Shard = ALONE,
        quantized: Mapping[str, QuantizedWeight] | None = None,
    ) -> None:
        """renamed: by what other names some of the checkpoint's tensors are asked for here.

        quantized: by the names that are asked for, what is kept in other tensors.
        """
        self.shard = shard
        self._quantized = quantized or {}
        self._renamed = renamed or {}
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._files = ExitStack()
        self._read: dict[str, tuple[Any, str]] = {}  # file, and name in it, by the names of tensors not read yet
        self._shard_of: dict[str, Path] = {}
        for path in files:
            self._open(path)
        self._total_bytes = sum(path.stat().st_size for path in files)
        self._done_bytes = self._told_bytes = 0
        progress("weights", 0, self._total_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._read.clear()
        self._files.close()

    def _open(self, path: Path) -> None:
        try:
            file = self._files.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not readable as safetensors: {error}") from error
        for name in file.keys():  # noqa: SIM118  (safe_open cannot be iterated)
            known_as = self._renamed.get(name, name)
            if known_as in self._read:
                raise CheckpointError(f"{path}: tensor {name} is in {self._shard_of[known_as].name} too")
            self._read[known_as] = file, name
            self._shard_of[known_as] = path

    def empty(self, *shape: int) -> Tensor:
        """An uninitialised tensor."""
        return _allocate(shape, self._dtype, self._device)

    def shape(self, name: str) -> tuple[int, ...]:
        """As its file's header says, or what that stands for."""
        if name in self._quantized:
            return self._quantized[name].shape
        file, stored_as = self._found(name)
        return tuple(file.get_slice(stored_as).get_shape())

    def _found(self, name: str) -> tuple[Any, str]:
        if name not in self._read:
            raise CheckpointError(f"the checkpoint has no tensor {name}")
        return self._read[name]

    def fill(self, out: Tensor, name: str, part: Part | None = None) -> None:
        """Read a tensor into out, converting its type; of a part no more than that, but for a quantized one."""
        if name in self._quantized:
            self._dequantize(out, name, part)
        else:
            tensor = self._take(name, out, part)
            _check_shape(name, tensor.shape, out.shape)
            if tensor.dtype not in FLOATS:
                raise CheckpointError(f"tensor {name} is of type {tensor.dtype}, which is not supported")
            out.copy_(tensor)
        check_finite(name, out)

    def _dequantize(self, out: Tensor, name: str, part: Part | None) -> None:
        weight = self._quantized[name]
        whole = out if part is None else self.empty(*weight.shape)
        _check_shape(name, weight.shape, whole.shape)
        dequantize(weight, {what: self._take(stored) for what, stored in weight.tensors.items()}, whole)
        if part is not None:
            there = whole.narrow(part.dim, part.start, out.shape[part.dim])
            _check_shape(name, there.shape, out.shape)
            out.copy_(there)

    def _take(self, name: str, out: Tensor | None = None, part: Part | None = None) -> Tensor:
        """A tensor of the files, which is read once; of a part what is as large as out."""
        file, stored_as = self._found(name)
        del self._read[name]
        if part is None or out is None:
            tensor: Tensor = file.get_tensor(stored_as)
        else:
            stored = file.get_slice(stored_as)
            piece = slice(part.start, part.start + out.shape[part.dim])
            tensor = stored[piece] if part.dim == 0 else stored[:, piece]
        self._count(tensor.nbytes)
        return tensor

    def skip(self, name: str) -> None:
        """Take a tensor off the list of those that must be read, or all that a quantized one is kept in."""
        quantized = self._quantized.get(name)
        for stored in (name,) if quantized is None else quantized.tensors.values():
            self._read.pop(stored, None)

    def finish(self) -> None:
        """Raise `CheckpointError` if a tensor is left over: the config does not describe these weights."""
        for name in [name for name in self._read if name.endswith(COMPUTED) or (self._quantized and is_unused(name))]:
            self.skip(name)
        for name in self._read.keys() & biases_of(self._quantized):
            if self._take(name).any():
                raise CheckpointError(f"the config has no place for {name}, which is not all zeros")
        if self._read:
            some = ", ".join(sorted(self._read)[:3])
            raise CheckpointError(f"the config has no place for {len(self._read)} tensors of the checkpoint: {some}")
        self._progress("weights", self._total_bytes, self._total_bytes)

    def _count(self, num_bytes: int) -> None:
        """Tell of each hundredth."""
        self._done_bytes += num_bytes
        if self._done_bytes - self._told_bytes >= max(1, self._total_bytes // 100):
            self._told_bytes = self._done_bytes
            self._progress("weights", self._done_bytes, self._total_bytes)


def _check_shape(name: str, found: Sequence[int], asked: Sequence[int]) -> None:
    if tuple(found) != tuple(asked):
        raise CheckpointError(f"tensor {name} is {list(found)}, but the config asks for {list(asked)}")


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise `CheckpointError` for a tensor with NaN or infinity in it: no answer could come of that.

    The sum is finite but for those and for an overflow, and takes a twentieth of the time of looking at each value.
    """
    if not math.isfinite(tensor.sum().item()) and not torch.isfinite(tensor).all():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(f"tensor {name} has values that are not finite in {kind}; see --dtype")


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # the CPU's allocator has no class of its own
        raise CheckpointError(
            f"no memory for a tensor of {list(shape)} as {dtype}, which config.json asks for"
        ) from error


class RandomWeights:
    """Weights drawn from a seed: normal with deviation 0.02, around 1 for norms and around 0 for the rest."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        shard: Shard = ALONE,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """shapes: of whole tensors by name, where parts are asked for."""
        self.shard = shard
        self._shapes = shapes or {}
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def empty(self, *shape: int) -> Tensor:
        """An uninitialised tensor."""
        return _allocate(shape, self._dtype, self._device)

    def shape(self, name: str) -> tuple[int, ...]:
        """As the config asks for it."""
        return self._shapes[name]

    def fill(self, out: Tensor, name: str, part: Part | None = None) -> None:
        """Draw the values. The name decides the mean; the order of calls, the numbers.

        Of a part the whole tensor is drawn, so that ranks together have what one process has.
        """
        mean = 1.0 if "norm" in name else 0.0
        if part is None:
            out.normal_(mean, 0.02, generator=self._generator)
            return
        whole = self.empty(*self.shape(name)).normal_(mean, 0.02, generator=self._generator)
        out.copy_(whole.narrow(part.dim, part.start, out.shape[part.dim]))

    def skip(self, name: str) -> None:
        """Nothing: random weights have every tensor and none."""

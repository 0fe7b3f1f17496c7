"""The choice of operations: the only place that asks which device it is."""

from typing import Final

import torch

from aserve.core.errors import ConfigError
from aserve.core.quantization import why_no_cache
from aserve.kernels.cpu import CpuOps
from aserve.kernels.native.library import INT8_VARIANTS, NativeUnavailableError, library
from aserve.kernels.native.native_ops import NativeOps
from aserve.kernels.ops import Ops

_FP8_CAPABILITY: Final = (8, 9)
"""Of the first GPUs that convert float8 (e4m3): Ada, and Hopper after it."""


def select_ops(device: torch.device, *, batch_invariant: bool = False, kv_cache_dtype: str = "auto") -> Ops:
    """The fastest operations for a device. Triton is imported for CUDA alone: it takes time, and Linux.

    batch_invariant: those that give a row the same bits in any batch, as a CPU's do anyway. kv_cache_dtype: of
    `KV_CACHE_DTYPES`, how keys and values are kept. The first call on a CPU may take seconds: our own kernels are
    compiled where no build of them lies yet.
    Raises ConfigError for a device that has none, or keeps nothing so.
    """
    if reason := why_no_cache(kv_cache_dtype, device.type):
        raise ConfigError(reason)
    if device.type == "cpu":
        return _cpu_ops()
    if device.type == "cuda":
        return _cuda_ops(device, batch_invariant, kv_cache_dtype)
    raise ConfigError(f"device must be cpu or cuda, got {device.type}")


def describe(ops: Ops, quantization: str | None = None) -> list[str]:
    """On a CPU, which kernels these are, what would change it, and where weights of int8 save memory alone."""
    if not isinstance(ops, CpuOps):
        return []
    if not isinstance(ops, NativeOps):
        return [f"CPU kernels: torch's, which are slower than aserve's own: {ops.why_plain}"]
    lines = [f"CPU kernels: aserve's own, compiled for {ops.variant}"]
    if quantization is not None and ops.variant not in INT8_VARIANTS:
        saved = "saves memory and no time here: aserve uses instructions for its products on x86 alone"
        lines.append(f"quantization: {quantization} {saved}")
    return lines


def _cuda_ops(device: torch.device, batch_invariant: bool, kv_cache_dtype: str) -> Ops:
    try:
        from aserve.kernels.fixed_ops import FixedOps
        from aserve.kernels.triton_ops import TritonOps
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ConfigError("device cuda needs Triton, which is not installed: pip install triton") from None
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    if kv_cache_dtype == "fp8" and capability < _FP8_CAPABILITY:
        needed, found = (".".join(map(str, x)) for x in (_FP8_CAPABILITY, capability))
        raise ConfigError(f"kv_cache_dtype fp8 takes a GPU of compute capability {needed} or later, this is {found}")
    kind = FixedOps if batch_invariant else TritonOps
    return kind(properties.multi_processor_count, capability)


def _cpu_ops() -> CpuOps:
    try:
        return NativeOps(library())
    except NativeUnavailableError as reason:
        return CpuOps(str(reason))

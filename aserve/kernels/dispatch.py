"""The choice of operations: the only place that asks which device it is."""

import torch

from aserve.core.errors import ConfigError
from aserve.kernels.cpu import CpuOps
from aserve.kernels.native.library import BYTE_VARIANTS, NativeUnavailableError, library
from aserve.kernels.native.native_ops import NativeOps
from aserve.kernels.ops import Ops


def select_ops(device: torch.device, *, batch_invariant: bool = False) -> Ops:
    """The fastest operations for a device. Triton is imported for CUDA alone: it takes time, and Linux.

    batch_invariant: those that give a row the same bits in any batch, as a CPU's do anyway. The first call on a CPU
    may take seconds: our own kernels are compiled where no build of them lies yet.
    Raises ConfigError for a device that has none.
    """
    if device.type == "cpu":
        return _cpu_ops()
    if device.type == "cuda":
        return _cuda_ops(device, batch_invariant)
    raise ConfigError(f"device must be cpu or cuda, got {device.type}")


def describe(ops: Ops) -> str | None:
    """On a CPU, which kernels these are, and what would change it."""
    if isinstance(ops, NativeOps):
        return f"CPU kernels: aserve's own, compiled for {ops.variant}"
    if isinstance(ops, CpuOps):
        return f"CPU kernels: torch's, which are slower than aserve's own: {ops.why_plain}"
    return None


def describe_int8(ops: Ops, quantization: str | None) -> str | None:
    """Where weights of int8 save memory alone, that they do."""
    if quantization is None or not isinstance(ops, NativeOps) or ops.variant in BYTE_VARIANTS:
        return None
    return f"quantization: {quantization} saves memory and no time here: this processor multiplies no bytes (VNNI)"


def _cuda_ops(device: torch.device, batch_invariant: bool) -> Ops:
    try:
        from aserve.kernels.fixed_ops import FixedOps
        from aserve.kernels.triton_ops import TritonOps
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ConfigError("device cuda needs Triton, which is not installed: pip install triton") from None
    properties = torch.cuda.get_device_properties(device)
    kind = FixedOps if batch_invariant else TritonOps
    return kind(properties.multi_processor_count, (properties.major, properties.minor))


def _cpu_ops() -> CpuOps:
    try:
        return NativeOps(library())
    except NativeUnavailableError as reason:
        return CpuOps(str(reason))

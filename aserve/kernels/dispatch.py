"""The choice of operations: the only place that asks which device it is."""

import torch

from aserve.core.errors import ConfigError
from aserve.kernels.cpu import CpuOps
from aserve.kernels.ops import Ops


def select_ops(device: torch.device, *, batch_invariant: bool = False) -> Ops:
    """The fastest operations for a device. Triton is imported for CUDA alone: it takes time, and Linux.

    batch_invariant: those that give a row the same bits in any batch, as a CPU's do anyway.
    Raises ConfigError for a device that has none.
    """
    if device.type == "cpu":
        return CpuOps()
    if device.type == "cuda":
        from aserve.kernels.fixed_ops import FixedOps
        from aserve.kernels.triton_ops import TritonOps

        properties = torch.cuda.get_device_properties(device)
        kind = FixedOps if batch_invariant else TritonOps
        return kind(properties.multi_processor_count, (properties.major, properties.minor))
    raise ConfigError(f"device must be cpu or cuda, got {device.type}")

"""A driver for Triton on a machine without a GPU: kernels are compiled for one, and a launch ends where CUDA begins."""

from types import SimpleNamespace
from typing import Any

import triton.backends.nvidia.driver as nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class NoDevice:
    """As much of Triton's CUDA driver as compiling and launching ask for. arch: 90 for sm_90, an H100 or H200."""

    def __init__(self, arch: int = 90) -> None:
        self._arch = arch
        self.launcher_cls = nvidia.CudaLauncher
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
            load_binary=lambda name, binary, shared_bytes, device: (1, 1, 0, 0, 1024),
            launch=launch_nothing,
            build_signature_metadata=bytes,
        )

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The only one."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return GPUTarget("cuda", self._arch, 32)


def launch_nothing(*arguments: object) -> None:
    """In place of the C function that hands a launch to CUDA."""


def use_no_device(arch: int = 90) -> None:
    """Make it Triton's driver in this process. Triton 3.6 makes a C module for each launcher; 3.7 has one for all."""
    driver.set_active(NoDevice(arch))
    replacements: dict[str, Any] = {
        "library_dirs": list,
        "compile_module_from_src": lambda **source: SimpleNamespace(launch=launch_nothing),
        "make_kernel_signature": lambda signature: b"",
        "annotate_arguments": lambda signature: [],
    }
    for name, replacement in replacements.items():
        setattr(nvidia, name, replacement)

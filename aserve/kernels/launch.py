"""Launches of Triton kernels, looked up once per shape: what Triton works out anew for every launch is kept.

Triton binds a launch's arguments by name, finds out what it specializes on (whether a size is 1 or divisible by 16,
whether an address is, each argument's type), makes a text of that, and looks the compiled kernel up by the text: 15 to
50 us of Python. A `Launch` is made once for a shape, with numbers and constants that never change, so that the types
and addresses of its tensors are all that is left to look at. It tells more launches apart than Triton does, and the
first of a kind is Triton's own, which says what it has compiled:

    operation -> its lru_cache: shape -> Launch: (device, types, alignments) -> compiled kernel -> driver
                                                 not seen yet: Triton's own launch, which compiles

Triton's launch hooks, those of a profiler, see no more than the first launch of a kind.

On Hopper and later a launch may overlap the one before it: its programs start while the last of that one's still run,
and wait in `wait_for_previous` for its end, so that what passes between two short kernels is hidden. Source: CUDA
Programming Guide, "Programmatic Dependent Launch". When the next one may start, `let_next_start` says:

    launch n       |= waits =|======== body ====|=|
    launch n + 1                                |= waits =|======== body ====|=|

Every kernel that overlaps waits first, on every way through. One that did not could end before the launch before it,
and the next one, which waits for it alone, would read what that one has yet to write. A kernel that fills the device
lets the next one start when its loop is done, and one before attention not at all: programs that come sooner crowd the
processors that are free first, and leave others idle when their turn has come (docs/performance.md, "On a GPU").
"""

import logging
from functools import lru_cache
from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_log = logging.getLogger(__name__)

SHAPES: Final = 4096
"""How many shapes an operation remembers, of about a kilobyte each."""
_ALIGNMENT: Final = 16
"""Bytes. Whether an address is divisible by it is what Triton specializes a tensor on, beside its type."""
_FIRST_TO_OVERLAP: Final = 90
"""Triton's number for Hopper."""
_KNOWN_VERSIONS: Final = ("3.6", "3.7")
"""Those whose rules of specialization, and whose arguments of a compiled kernel's `run`, are as this file has them."""


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    """Wait until the launch before has ended, and what it wrote can be read."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(OVERLAPS: tl.constexpr):
    """Have the next launch's programs start as soon as all of this one's have come here, or ended."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


class Launch:
    """A kernel on one shape, to be called with the kernel's tensors; None stands for one that it does without.

    numbers: what follows the tensors in the kernel's signature. constants: its constexprs, num_warps and num_stages.
    overlaps: the kernel has a constexpr OVERLAPS and calls `wait_for_previous`; it overlaps where the device can.
    """

    __slots__ = ("_compiled", "_constants", "_grid", "_kernel", "_numbers", "_remembers")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        numbers: tuple[float, ...] = (),
        *,
        overlaps: bool = False,
        **constants: object,
    ) -> None:
        self._kernel, self._grid, self._numbers, self._constants = kernel, grid, numbers, constants
        self._compiled: dict[tuple[object, ...], tuple[Any, ...]] = {}
        # Under Triton's interpreter a kernel is no JITFunction, and nothing is compiled.
        is_compiled = isinstance(kernel, JITFunction)
        self._remembers = is_compiled and is_known_version(triton.__version__)
        if overlaps:
            constants["OVERLAPS"] = is_compiled and driver.active.get_current_target().arch >= _FIRST_TO_OVERLAP
            constants["launch_pdl"] = constants["OVERLAPS"]

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on the current stream of the current device. Tensors have to be on that device."""
        if not self._remembers:
            self.launch_by_triton(tensors)
            return
        active = driver.active
        device = active.get_current_device()
        kind: list[object] = [device]
        addresses: list[int | None] = []
        for tensor in tensors:
            if tensor is None:
                addresses.append(None)
                kind.append(None)
            else:
                address = tensor.data_ptr()
                addresses.append(address)
                kind.append((tensor.dtype,) if address % _ALIGNMENT else tensor.dtype)
        compiled = self._compiled.get(tuple(kind))
        if compiled is None:
            self._compiled[tuple(kind)] = self._as_compiled(self.launch_by_triton(tensors), len(tensors))
            return
        run, x, y, z, function, metadata, others = compiled
        stream = active.get_current_stream(device)
        # None: the launch's description for hooks, the hook before it, the hook after it.
        run(x, y, z, stream, function, metadata, None, None, None, *addresses, *others)

    def launch_by_triton(self, tensors: tuple[Tensor | None, ...]) -> Any:
        """The slow twin: a launch like any of Triton's. Returns the compiled kernel, or None from the interpreter."""
        return self._kernel[self._grid](*tensors, *self._numbers, **self._constants)

    def _as_compiled(self, kernel: Any, num_tensors: int) -> tuple[Any, ...]:
        """What a launch takes beside stream and addresses. Constants keep their places, though none is handed on."""
        names = self._kernel.arg_names[num_tensors + len(self._numbers) :]
        others = (*self._numbers, *(self._constants[name] for name in names))
        x, y, z = (*self._grid, 1, 1)[:3]
        return kernel.run, x, y, z, kernel.function, kernel.packed_metadata, others


@lru_cache(maxsize=4)
def is_known_version(version: str) -> bool:
    """Whether compiled kernels may be launched as they are here. Another version is named in the log, once."""
    if version.startswith(tuple(f"{known}." for known in _KNOWN_VERSIONS)):
        return True
    _log.warning("Triton %s is not among %s: launches take its own way, 15 to 50 us each", version, _KNOWN_VERSIONS)
    return False

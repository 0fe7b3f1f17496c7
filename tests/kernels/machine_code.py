"""What a compiled kernel takes of a processor of a GPU, read from its machine code for sm_90 by CUDA's own tools."""

import re
import subprocess
from dataclasses import asdict, dataclass
from typing import Final

import triton
from triton.compiler import CompiledKernel

REGISTERS_OF_AN_SM: Final = 64 * 1024
WARPS_OF_AN_SM: Final = 64
SHARED_BYTES_OF_AN_SM: Final = 228 * 1024
RESERVED_SHARED_BYTES: Final = 1024
"""Of each program, by CUDA."""
REGISTER_UNIT: Final = 256
"""Registers are dealt out to a warp in so many. These five: CUDA C++ programming guide, compute capability 9.0."""

_LINE: Final = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][A-Z0-9_.]*)(.*);", re.MULTILINE)
_MATRIX: Final = (("HGMMA", "QGMMA"), ("HMMA",))
"""Of 16 bits and of float8."""


@dataclass(frozen=True)
class Loop:
    """An innermost loop with matrix products: its instructions, and those that multiply, by a warp group or a warp."""

    instructions: int
    wgmma: int
    mma: int


def describe(kernel: CompiledKernel) -> dict[str, int]:
    """registers and stack_bytes of a thread, shared_bytes of a program, programs_per_sm.

    waits, lets_start: how many instructions wait for the launch before, and let the next one start.
    """
    usage = _cuobjdump("--dump-resource-usage", _cubin(kernel))
    [(registers, stack)] = re.findall(rf"Function {kernel.metadata.name}:\n.*REG:(\d+) STACK:(\d+)", usage)
    return {
        "registers": int(registers),
        "stack_bytes": int(stack),
        "shared_bytes": kernel.metadata.shared,
        "programs_per_sm": programs_per_sm(int(registers), kernel.metadata.num_warps, kernel.metadata.shared),
        "overlaps": kernel.metadata.launch_pdl,
        "waits": kernel.asm["ptx"].count("griddepcontrol.wait"),
        "lets_start": kernel.asm["ptx"].count("griddepcontrol.launch_dependents"),
    }


def describe_loop(kernel: CompiledKernel) -> dict[str, int]:
    """instructions, wgmma and mma of the shortest loop with matrix products (`Loop`); nothing where there is none.

    Half a second, of which a loop is looked for where its figures are asked for.
    """
    if not any(name in kernel.asm["ptx"] for name in ("wgmma.mma_async", "mma.sync")):
        return {}
    loops = matrix_loops(_cuobjdump("-sass", _cubin(kernel)))  # none where the compiler has unrolled it
    shortest = sorted(loops, key=lambda loop: loop.instructions)[:1]
    return {name: value for loop in shortest for name, value in asdict(loop).items()}


def programs_per_sm(registers: int, num_warps: int, shared_bytes: int) -> int:
    """How many programs a processor runs side by side."""
    registers_of_a_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    return min(
        REGISTERS_OF_AN_SM // registers_of_a_warp // num_warps,
        WARPS_OF_AN_SM // num_warps,
        SHARED_BYTES_OF_AN_SM // (shared_bytes + RESERVED_SHARED_BYTES),
        32,
    )


def matrix_loops(sass: str) -> list[Loop]:
    """A loop ends with a branch back to where it begins."""
    lines = [(int(address, 16), operation, rest) for address, operation, rest in _LINE.findall(sass)]
    ranges = [
        (int(rest.strip().split()[-1], 16), address)
        for address, operation, rest in lines
        if operation == "BRA" and int(rest.strip().split()[-1], 16) < address
    ]
    innermost = [r for r in ranges if not any(r[0] <= q[0] and q[1] <= r[1] and q != r for q in ranges)]
    loops = []
    for begin, end in innermost:
        operations = [operation for address, operation, _ in lines if begin <= address <= end]
        wgmma, mma = (sum(operation.startswith(kind) for operation in operations) for kind in _MATRIX)
        if wgmma + mma:
            loops.append(Loop(len(operations), wgmma, mma))
    return loops


def _cubin(kernel: CompiledKernel) -> str:
    return str(next(path for path in kernel.metadata_group.values() if str(path).endswith(".cubin")))


def _cuobjdump(*arguments: str) -> str:
    command = [triton.knobs.nvidia.cuobjdump.path, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout

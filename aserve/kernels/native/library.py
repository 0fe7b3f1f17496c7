"""The compiled kernels: which variant this processor takes, where it lies, and how it is made.

A variant is the same sources compiled for one instruction set. Wheels bring all of a platform's; where the right one is
missing (a source tree, or sources that were changed), it is compiled: a few seconds, once. Its file is named after
a hash of sources and flags, so that what lies there is never stale. It runs on the OpenMP threads that torch has:
a second pool of threads would spin against them.

Building a wheel loads this file by itself: it needs Python's own library alone until kernels are asked for.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

_SOURCES: Final = Path(__file__).parent / "src"
_FLAGS: Final = (
    *("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-Wall"),
    "-falign-loops=64",  # else a change anywhere moves inner loops across lines of code, which took an eighth more
)
_COMPILERS: Final = ("g++", "clang++", "c++")
_TIMEOUT_S: Final = 300.0

VARIANTS: Final[Mapping[str, Mapping[str, tuple[str, tuple[str, ...]]]]] = {
    "x86_64": {
        "amx": (
            "avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16 amx_tile amx_bf16",
            ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        ),
        "avx512-bf16": (
            "avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16",
            ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
        ),
        "avx512-vnni": ("avx512f avx512bw avx512vl avx512dq avx512_vnni", ("-march=x86-64-v4", "-mavx512vnni")),
        "avx512": ("avx512f avx512bw avx512vl avx512dq", ("-march=x86-64-v4",)),
        "avx2": ("avx2 fma f16c bmi2", ("-march=x86-64-v3",)),
    },
    "aarch64": {"neon": ("asimd fphp", ("-march=armv8.2-a",))},
}
"""Machine, then variant, the fastest first: what /proc/cpuinfo has to name, and the flags to compile with."""
INT8_VARIANTS: Final = frozenset(VARIANTS["x86_64"])
"""Those on which weights of int8 save time: an instruction multiplies four times as many bytes as floats (VNNI), or
twice as many numbers of 16 bits."""

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
_VECTOR_WIDTH: Final = "-mprefer-vector-width=512"


class NativeUnavailableError(Exception):
    """Why there are no compiled kernels here, in words for the operator."""


class Library:
    """The kernels as functions that release the GIL. variant: what they were compiled for."""

    def __init__(self, path: Path, variant: str) -> None:
        self.variant = variant
        self._dll = ctypes.CDLL(str(path))
        self._watch = _Watch()
        self.call_all = self.function("call_all", [ctypes.c_void_p, ctypes.c_int64]).call
        """Make the calls of a `CallTable`, of which it takes the address and how many there are."""

    def function(self, name: str, argument_types: Sequence[Any]) -> "Kernel":
        """A kernel by its name in C, which takes such arguments and returns nothing."""
        function = getattr(self._dll, name)
        function.argtypes, function.restype = list(argument_types), None
        return Kernel(name, function, self._watch)

    @contextmanager
    def observed(self) -> Iterator["Seen"]:
        """What this thread calls meanwhile, in order."""
        self._watch.seen = seen = []
        try:
            yield seen
        finally:
            self._watch.seen = None


class Kernel:
    """A function in C, to be called. call: the same, unseen by `Library.observed`. address: where its code lies."""

    __slots__ = ("_watch", "address", "argument_types", "call", "name")

    def __init__(self, name: str, function: Any, watch: "_Watch") -> None:
        self.name, self.call, self._watch = name, function, watch
        self.argument_types: Sequence[Any] = function.argtypes
        self.address = ctypes.cast(function, ctypes.c_void_p).value or 0

    def __call__(self, *arguments: Any) -> None:
        """Call it, without Python's lock."""
        self.call(*arguments)
        if (seen := self._watch.seen) is not None:
            seen.append((self, arguments))


Seen = list[tuple[Kernel, tuple[Any, ...]]]
"""Kernels, and what they were called with."""


class _Watch(threading.local):
    """What a thread has called, while that is asked for."""

    seen: Seen | None = None


@cache
def library() -> Library:
    """The kernels for this processor, compiled now if they never were.

    Raises `NativeUnavailableError` where they cannot be had.
    """
    import torch  # noqa: F401  (its OpenMP is what kernels run on)

    variant = own_variant()
    ctypes.CDLL(str(_openmp()), mode=ctypes.RTLD_GLOBAL)
    path = find_or_compile(variant)
    try:
        return Library(path, variant)
    except OSError as error:
        raise NativeUnavailableError(f"{path} cannot be loaded: {error}") from error


def find_or_compile(variant: str) -> Path:
    """The file of a variant: the one that lies in the first of its places that has it, else compiled now.

    Raises `NativeUnavailableError`.
    """
    return find(variant) or _compile_somewhere(variant)


def find(variant: str) -> Path | None:
    """The file of a variant; None where it was never compiled."""
    return next((path for path in _places(variant) if path.exists()), None)


def own_variant() -> str:
    """The fastest variant of this processor. Raises `NativeUnavailableError` for none."""
    return choose_variant(platform.machine(), _processor_flags())


def find_compiler() -> str:
    """A C++ compiler. Raises `NativeUnavailableError` where there is none."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise NativeUnavailableError(f"no C++ compiler was found ({', '.join(_COMPILERS)}): install one")
    return compiler


def choose_variant(machine: str, processor_flags: frozenset[str]) -> str:
    """The fastest variant whose instructions a processor has. Raises `NativeUnavailableError` for none."""
    for variant, (needed, _) in VARIANTS.get(machine, {}).items():
        if processor_flags.issuperset(needed.split()):
            return variant
    raise NativeUnavailableError(f"there are none for this {machine or 'unknown'} processor on {platform.system()}")


def compile_variant(variant: str, folder: Path, *, extra_flags: Sequence[str] = ()) -> Path:
    """Compile into a folder, and return the file. Raises `NativeUnavailableError`, with what the compiler said."""
    compiler = find_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / _file_name(variant)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        flags = (*_FLAGS, *_variant_flags(variant), *extra_flags)
        objects = [Path(scratch) / f"{source.stem}.o" for source in _sources(".cpp")]
        commands = [
            [compiler, *flags, "-c", str(source), "-o", str(compiled)]
            for source, compiled in zip(_sources(".cpp"), objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as side_by_side:
            list(side_by_side.map(_run, commands))
        # Linked without -fopenmp: the OpenMP that torch has loaded is found when the file is.
        built = Path(scratch) / target.name
        _run([compiler, "-shared", *map(str, objects), "-o", str(built), *extra_flags])
        built.replace(target)  # at once: another process may be looking
    return target


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise NativeUnavailableError(f"{command[0]} failed: {error.stderr.strip()[-500:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"{command[0]} failed: {error}") from error


def _compile_somewhere(variant: str) -> Path:
    reason = NativeUnavailableError("no folder to compile into")
    for path in _places(variant):
        try:
            return compile_variant(variant, path.parent)
        except OSError as error:  # a folder that cannot be written
            reason = NativeUnavailableError(str(error))
    raise reason


def _places(variant: str) -> Iterator[Path]:
    """Beside the sources, as in a wheel or a source tree, else in the user's cache."""
    name = _file_name(variant)
    yield Path(__file__).parent / "lib" / name
    yield Path.home() / ".cache" / "aserve" / name


@cache
def _file_name(variant: str) -> str:
    digest = hashlib.sha256(repr((_FLAGS, _variant_flags(variant))).encode())
    for source in (*_sources(".h"), *_sources(".cpp")):
        digest.update(source.read_bytes())
    return f"{variant}-{digest.hexdigest()[:16]}.so"


def _variant_flags(variant: str) -> tuple[str, ...]:
    flags = next(variants[variant][1] for variants in VARIANTS.values() if variant in variants)
    return (*flags, _VECTOR_WIDTH) if variant.startswith(("amx", "avx512")) else flags


def _sources(suffix: str) -> list[Path]:
    return sorted(_SOURCES.glob(f"*{suffix}"))


def _processor_flags() -> frozenset[str]:
    """What the processor can do, as Linux says; nothing elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    flags = frozenset(line.partition(":")[2].split())
    return flags if "amx_tile" not in flags or _may_use_tiles() else flags - {"amx_tile"}


def _may_use_tiles() -> bool:
    """Ask Linux for the matrix units of this process, which have registers of 8 KiB (`ARCH_REQ_XCOMP_PERM`)."""
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def _openmp() -> Path:
    """The OpenMP library that torch has loaded."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError as error:
        raise NativeUnavailableError(f"the libraries that torch has loaded cannot be told: {error}") from error
    paths = {line.split(maxsplit=5)[5] for line in lines if "libgomp" in line}
    if len(paths) != 1:
        raise NativeUnavailableError(f"torch has loaded {len(paths)} GNU OpenMP libraries, and there has to be one")
    return Path(paths.pop())

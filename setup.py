"""Wheels bring the CPU kernels, compiled for every variant of the platform; the rest is in pyproject.toml.

Where nothing can be compiled the wheel is for any platform, and kernels are compiled where it is installed, if they can
be there.

An editable install finds the package in the clone by an entry of sys.path (docs/adr/0018).
"""

import platform
import runpy
from pathlib import Path
from typing import Any, Self

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

NATIVE = Path("aserve/kernels/native")
EDITABLE_HOOK = '''\
"""Finds aserve in the clone that was installed editably, where sys.path has ENTRY; and nothing else of the clone."""

import sys
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader

CLONE = {clone!r}
ENTRY = "aserve.editable:" + CLONE


class CloneFinder:
    """What finds modules for one entry of sys.path."""

    def __init__(self):
        self._files = FileFinder(CLONE, (SourceFileLoader, SOURCE_SUFFIXES))

    def find_spec(self, name, target=None):
        """Of the package; None of all else."""
        return self._files.find_spec(name, target) if name == "aserve" else None

    def invalidate_caches(self):
        """As importlib asks of each finder."""
        self._files.invalidate_caches()


def path_hook(entry):
    """A finder for ENTRY; ImportError for others, as sys.path_hooks wants it."""
    if entry != ENTRY:
        raise ImportError
    return CloneFinder()


sys.path_hooks.append(path_hook)
sys.path.append(ENTRY)
'''


class BuildWithKernels(build_py):
    """Copies the package, then compiles into the copy; an editable install compiles at set-up or first start."""

    def run(self) -> None:
        """Compiles after copying."""
        super().run()
        if not self.editable_mode:
            compile_all(Path(self.build_lib) / NATIVE / "lib")


class EditableByHook:
    """How setuptools is told what an editable wheel holds: a module with a hook, and a .pth file that imports it."""

    def __call__(self, wheel: Any, files: list[str], mapping: dict[str, str]) -> None:
        """Writes both."""
        wheel.writestr("_aserve_clone.py", EDITABLE_HOOK.replace("{clone!r}", repr(str(Path.cwd()))))
        wheel.writestr("_aserve_clone.pth", "import _aserve_clone\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class EditableWheel(editable_wheel):
    """Where setuptools' own finder is asked after the folders of sys.path, the hook is asked as one of them."""

    def _select_strategy(self, name: str, tag: str, build_lib: str) -> EditableByHook:
        return EditableByHook()


class PlatformWheel(bdist_wheel):
    """Any Python 3 of this platform can load the kernels."""

    def get_tag(self) -> tuple[str, str, str]:
        """py3-none-PLATFORM where kernels were compiled, else py3-none-any."""
        _, _, tag = super().get_tag()
        has_kernels = any((Path(self.bdist_dir) / NATIVE / "lib").glob("*.so"))
        return "py3", "none", tag if has_kernels else "any"


class MaybeBinary(Distribution):
    """Has compiled parts, as far as setuptools asks; see PlatformWheel."""

    def has_ext_modules(self) -> bool:
        """So that the platform is told."""
        return True


def compile_all(folder: Path) -> None:
    """Every variant of this platform."""
    library: dict[str, Any] = runpy.run_path(str(NATIVE / "library.py"))
    for variant in library["VARIANTS"].get(platform.machine(), {}):
        try:
            library["compile_variant"](variant, folder)
        except library["NativeUnavailableError"] as reason:
            print(f"no CPU kernels for {variant}: {reason}")


setup(
    distclass=MaybeBinary,
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel, "editable_wheel": EditableWheel},
)

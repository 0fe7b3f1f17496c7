"""Wheels bring the CPU kernels, compiled for every variant of the platform; the rest is in pyproject.toml.

Where nothing can be compiled the wheel is for any platform, and kernels are compiled where it is installed, if they can
be there.
"""

import platform
import runpy
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("aserve/kernels/native")


class BuildWithKernels(build_py):
    """Copies the package, then compiles into the copy; an editable install compiles at set-up or first start."""

    def run(self) -> None:
        """Compiles after copying."""
        super().run()
        if not self.editable_mode:
            compile_all(Path(self.build_lib) / NATIVE / "lib")


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


setup(distclass=MaybeBinary, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})

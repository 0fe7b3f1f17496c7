"""What gather_wheels.sh asks pip for, and whether what pip brought is whole, for the image, and small enough.

python scripts/wheels.py wanted          requirements of pyproject.toml that the image lacks, a line each
python scripts/wheels.py check FOLDER    deletes what the image has, prints the others' sizes; exits with what is wrong
"""

import argparse
import sys
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from email import message_from_bytes
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT: Final = Path(__file__).resolve().parent.parent
PYPROJECT: Final = ROOT / "pyproject.toml"
IMAGE: Final = ROOT / "scripts" / "gpu_image.txt"
PYTHON: Final = (3, 12)
EXTRA: Final = "test"
LIMIT_BYTES: Final = 60 * 2**20
ENVIRONMENT: Final = {
    "python_version": "3.12",
    "python_full_version": "3.12.0",
    "platform_system": "Linux",
    "sys_platform": "linux",
    "platform_machine": "x86_64",
    "extra": "",
}
"""Of the image, in place of this machine's, for the markers of requirements."""


class WheelsError(Exception):
    """The wheels do not serve; the message has every reason."""


def image(text: str) -> dict[str, str | None]:
    """Names and versions of gpu_image.txt; None: any version."""
    lines = (line.partition("==") for line in text.splitlines() if line and not line.startswith("#"))
    return {canonicalize_name(name.strip()): version.strip() or None for name, _, version in lines}


def asked(pyproject: str) -> list[str]:
    """What pyproject.toml asks for to run and to test."""
    project = tomllib.loads(pyproject)["project"]
    return [*project["dependencies"], *project["optional-dependencies"][EXTRA]]


def wanted(requirements: Sequence[str], on_image: Mapping[str, str | None]) -> list[str]:
    """Those that the image lacks."""
    return [line for line in requirements if _applies(Requirement(line)) and _name(Requirement(line)) not in on_image]


def problems(requirements: Sequence[str], wheels: Sequence[Path], on_image: Mapping[str, str | None]) -> list[str]:
    """What is wrong with them, a line each; requirements: those of aserve, all of them."""
    found = [f"{path.name} is not for Python 3.12 on x86-64" for path in wheels if not _fits(path)]
    versions = dict(on_image) | {_wheel_name(path): str(parse_wheel_filename(path.name)[1]) for path in wheels}
    pairs = [("aserve", Requirement(line)) for line in requirements]
    pairs += [(_wheel_name(path), requirement) for path in wheels for requirement in _requirements(path)]
    for asker, requirement in pairs:
        if not _applies(requirement):
            continue
        version = versions.get(_name(requirement))
        if _name(requirement) not in versions:
            found.append(f"{asker} asks for {requirement}, which is neither gathered nor on the image")
        elif version is not None and not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{asker} asks for {requirement}, but {version} is there")
    num_bytes = sum(path.stat().st_size for path in wheels)
    if num_bytes > LIMIT_BYTES:
        found.append(f"{num_bytes / 2**20:.1f} MiB, more than {LIMIT_BYTES / 2**20:g}")
    return found


def check(folder: Path) -> str:
    """Deletes what the image has; sizes of the wheels left, a line each, and of all. Raises WheelsError."""
    on_image = image(IMAGE.read_text())
    for path in folder.glob("*.whl"):
        if _wheel_name(path) in on_image:
            path.unlink()
    wheels = sorted(folder.glob("*.whl"))
    sizes = [(path.stat().st_size, path.name) for path in wheels]
    lines = [f"{size / 2**20:7.2f} MiB  {name}" for size, name in [*sizes, (sum(size for size, _ in sizes), "all")]]
    if found := problems(asked(PYPROJECT.read_text()), wheels, on_image):
        raise WheelsError("\n".join([*lines, *found]))
    return "\n".join(lines)


def _wheel_name(wheel: Path) -> str:
    return parse_wheel_filename(wheel.name)[0]


def _name(requirement: Requirement) -> str:
    return canonicalize_name(requirement.name)


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate(ENVIRONMENT)


def _fits(wheel: Path) -> bool:
    platforms = ["manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(5, 35))]
    accepted: set[Tag] = {*cpython_tags(PYTHON, platforms=platforms), *compatible_tags(PYTHON, "cp312", platforms)}
    return not accepted.isdisjoint(parse_wheel_filename(wheel.name)[3])


def _requirements(wheel: Path) -> list[Requirement]:
    """Of a wheel's METADATA."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA") and name.count("/") == 1)
        return [Requirement(line) for line in message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("wanted")
    commands.add_parser("check").add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.command == "wanted":
        print("\n".join(wanted(asked(PYPROJECT.read_text()), image(IMAGE.read_text()))))
        return
    try:
        print(check(args.folder))
    except WheelsError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

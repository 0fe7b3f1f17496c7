"""What is installed and shipped: a clone of any name, a source distribution that is whole, and a wheel that serves."""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.doc_pages import Server

ROOT = Path(__file__).parent.parent
COMPILED = "aserve/kernels/native/lib"
"""Where kernels are compiled to: here for this machine alone."""


def tracked(folder: str = ".") -> set[str]:
    """The files of the repository that lie in a folder."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone: what it should hold is not known")
    listed = subprocess.run(["git", "ls-files", "-z", folder], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's files in a folder that is named aserve, and a kernel that was compiled there."""
    folder = tmp_path_factory.mktemp("projects") / "aserve"
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / COMPILED).mkdir()
    (folder / COMPILED / "mine.so").touch()
    return folder


def run_setup(code: str, cwd: Path, *arguments: str) -> list[str]:
    """What setuptools prints, line by line, when `code` asks it for something, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


SDIST = "import sys; from setuptools.build_meta import build_sdist; print(build_sdist(sys.argv[1]))"
EDITABLE = "import sys; from setuptools.build_meta import build_editable; print(build_editable(sys.argv[1]))"
WHEEL_FILES = """
import sys
from distutils.core import run_setup
import setuptools
sys.argv = ["setup.py", "egg_info"]
distribution = run_setup("setup.py", stop_after="commandline")
distribution.run_command("egg_info")
command = distribution.get_command_obj("build_py")
command.ensure_finalized()
print("FILES", *command.get_output_mapping().values(), sep="\\n")
"""


@pytest.mark.slow
def test_the_source_distribution_is_the_repository(clone, tmp_path):
    name = run_setup(SDIST, clone, str(tmp_path))[-1]
    with tarfile.open(tmp_path / name) as archive:
        held = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert tracked() - held == set()
    assert {each for each in held - tracked() if "egg-info" not in each} == {"PKG-INFO", "setup.cfg"}


@pytest.mark.slow
def test_every_file_of_the_package_goes_into_the_wheel(clone):
    lines = run_setup(WHEEL_FILES, clone)
    assert set(lines[lines.index("FILES") + 1 :]) == tracked("aserve")


@pytest.fixture(scope="module")
def editable(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an editable install of the clone puts into site-packages."""
    folder = tmp_path_factory.mktemp("editable")
    name = run_setup(EDITABLE, clone, str(folder))[-1]
    with zipfile.ZipFile(folder / name) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def imported(script: str, folder: Path, site: Path, first: str = "") -> str:
    """What a script in `folder` prints, with the install of `site`, the packages that there are, and no other aserve.

    first: what PYTHONPATH has.
    """
    packages = Path(pytest.__file__).parent.parent
    begin = f"import site, sys; site.addsitedir({str(site)!r}); sys.path.append({str(packages)!r})\n"
    (folder / "script.py").write_text(begin + script)
    done = subprocess.run(
        [sys.executable, "-S", "script.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": first},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


WHERE = "import aserve; from aserve import AsyncEngine; print(aserve.__file__)"


@pytest.mark.slow
def test_a_script_beside_a_clone_of_the_packages_name_finds_the_package(clone, editable):
    assert imported(WHERE, clone.parent, editable) == str(clone / "aserve" / "__init__.py")


@pytest.mark.slow
def test_another_copy_that_is_named_first_is_taken(editable, tmp_path):
    """PYTHONPATH, a worktree's tests, an application that carries its own."""
    copy = tmp_path / "copy" / "aserve"
    copy.mkdir(parents=True)
    (copy / "__init__.py").write_text("AsyncEngine = None")
    assert imported(WHERE, tmp_path, editable, str(copy.parent)) == str(copy / "__init__.py")


@pytest.mark.slow
def test_an_editable_install_brings_no_other_module(editable, tmp_path):
    """The clone's tests, scripts and setup.py are nobody else's."""
    script = "import importlib.util as u; print(*(n for n in ('tests', 'scripts', 'docs', 'setup') if u.find_spec(n)))"
    assert imported(script, tmp_path, editable) == ""


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_a_wheel_out_of_the_source_distribution_serves_the_demo(clone, tmp_path):
    """`python -m build`: kernels are compiled, and nothing of the clone is needed."""
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(clone)]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    assert sdist.stat().st_size < 2**25
    names = set(zipfile.ZipFile(wheel).namelist())
    assert tracked("aserve") - names == set()
    assert f"{COMPILED}/mine.so" not in names
    has_kernels = any(name.startswith(COMPILED) for name in names)
    assert has_kernels == ("any" not in wheel.name), "a wheel with kernels is for one platform"

    place = tmp_path / "venv"
    venv.create(place, with_pip=False)
    (site,) = (place / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "others.pth").write_text(str(Path(pytest.__file__).parent.parent))
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    python = str(place / "bin" / "python")
    with closing(Server([python, "-m", "aserve", "serve", "demo"], tmp_path, environ)) as server:
        question = {"messages": [{"role": "user", "content": "What is aserve?"}], "temperature": 0}
        answer = httpx.post(f"http://{server.address}/v1/chat/completions", json=question, timeout=60).json()
        assert answer["choices"][0]["message"]["content"]
        assert not has_kernels or any("aserve's own" in line for line in server.lines)
    where = [python, "-c", "import aserve; print(aserve.__file__)"]
    assert str(place) in subprocess.check_output(where, cwd=tmp_path, env=environ, text=True)

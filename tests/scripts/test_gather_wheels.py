"""What a GPU machine without a network is given: what pyproject.toml asks for and its image lacks, and all of that."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import wheels

ROOT = Path(__file__).parents[2]


def wheel(folder, name, *requirements, tag="py3-none-any", num_bytes=0):
    """A wheel with METADATA, and of about a size."""
    path = folder / f"{name}-1.0-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        lines = "".join(f"Requires-Dist: {line}\n" for line in requirements)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Name: {name}\nVersion: 1.0\n{lines}")
        archive.writestr("data", bytes(num_bytes))
    return path


def test_the_image_is_left_out_and_the_rest_of_pyproject_is_not():
    requirements = wheels.asked((ROOT / "pyproject.toml").read_text())
    on_image = wheels.image((ROOT / "scripts/gpu_image.txt").read_text())
    lines = wheels.wanted(requirements, on_image)
    assert {"msgspec>=0.19", "hypercorn>=0.18,<0.19", "pytest", "pytest-asyncio"} <= set(lines)
    assert not [line for line in lines if line.startswith(("torch", "triton", "transformers", "numpy"))]
    assert len(lines) + len(on_image) == len(requirements), "a name of the image that pyproject.toml does not ask for"


def test_markers_are_read_for_the_image_and_not_for_this_machine():
    lines = ["a; python_version < '3.12'", "b; python_version >= '3.12'", "c; platform_system == 'Windows'", "D_d>1"]
    assert wheels.wanted(lines, {}) == ["b; python_version >= '3.12'", "D_d>1"]
    assert wheels.wanted(lines, {"d-d": None}) == ["b; python_version >= '3.12'"]


def test_what_is_whole_and_small_has_no_problem(tmp_path):
    gathered = [
        wheel(tmp_path, "a", "b>=1", "numpy>=2", "extra_only; extra == 'x'", "old; python_version < '3.11'"),
        wheel(tmp_path, "b", tag="cp312-cp312-manylinux2014_x86_64.manylinux_2_17_x86_64"),
        wheel(tmp_path, "c", tag="cp39-abi3-manylinux_2_28_x86_64"),
    ]
    assert wheels.problems(["a", "torch>=2.11"], gathered, {"numpy": "2.5.2", "torch": None}) == []


@pytest.mark.parametrize(
    ("requirements", "of_a", "tag", "expected"),
    [
        (["a", "lost"], (), "py3-none-any", "aserve asks for lost, which is neither gathered nor on the image"),
        (["a"], ("lost>1",), "py3-none-any", "a asks for lost>1, which is neither gathered nor on the image"),
        (["a>=2"], (), "py3-none-any", "aserve asks for a>=2, but 1.0 is there"),
        (["a"], ("numpy<2",), "py3-none-any", "a asks for numpy<2, but 2.5.2 is there"),
        (["a"], (), "cp311-cp311-manylinux2014_x86_64", "is not for Python 3.12 on x86-64"),
        (["a"], (), "cp312-cp312-manylinux2014_aarch64", "is not for Python 3.12 on x86-64"),
        (["a"], (), "cp312-cp312-manylinux_2_39_x86_64", "is not for Python 3.12 on x86-64"),
    ],
)
def test_what_would_fail_on_the_machine_is_told_here(tmp_path, requirements, of_a, tag, expected):
    [problem] = wheels.problems(requirements, [wheel(tmp_path, "a", *of_a, tag=tag)], {"numpy": "2.5.2"})
    assert expected in problem


def test_more_than_the_limit_is_a_problem(tmp_path):
    gathered = [wheel(tmp_path, name, num_bytes=30 * 2**20) for name in ("a", "b")]
    assert wheels.problems([], gathered[:1], {}) == []
    assert wheels.problems([], gathered, {}) == ["60.0 MiB, more than 60"]


def test_the_script_asks_pip_for_the_image_s_python_and_fails_where_wheels_are_missing(tmp_path):
    """A pip that brings nothing: a stale wheel must be gone, and the script must not end well."""
    wheel(tmp_path, "stale")
    fake = tmp_path / "python"
    fake.write_text(
        f'#!/bin/sh\nif [ "$1" = -m ]; then echo "$@" >"{tmp_path}/pip.txt"; else exec "{sys.executable}" "$@"; fi\n'
    )
    fake.chmod(0o755)
    done = subprocess.run(
        ["bash", ROOT / "scripts/gather_wheels.sh", tmp_path],
        env={**os.environ, "PYTHON": str(fake)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "aserve asks for msgspec>=0.19, which is neither gathered nor on the image" in done.stderr
    assert not list(tmp_path.glob("*.whl"))
    options = (tmp_path / "pip.txt").read_text()
    assert "--only-binary=:all: --implementation cp --python-version 3.12" in options
    assert "--platform manylinux_2_28_x86_64" in options
    assert "msgspec>=0.19" in (tmp_path / "wanted.txt").read_text()


def test_dev_installs_what_the_gpu_check_runs_tests_with():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "aserve[test]" in extras["dev"]


def test_wheels_of_the_image_are_deleted_before_the_rest_is_weighed(tmp_path):
    """What another wheel has brought along: on the machine it would hide the image's own."""
    on_image, own = wheel(tmp_path, "numpy"), wheel(tmp_path, "msgspec")
    with pytest.raises(wheels.WheelsError, match=r"0\.00 MiB  msgspec-1\.0"):  # the rest of aserve's is missing
        wheels.check(tmp_path)
    assert own.exists()
    assert not on_image.exists()

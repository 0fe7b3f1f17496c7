"""README.md: its commands work in a fresh shell, from any folder. What its blocks do is run by test_docs.py."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from aserve import __version__
from tests.doc_pages import ROOT, blocks

README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
BIN = Path(sys.executable).parent
FRESH = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
"""The environment of a shell in which nothing has been set up."""


def test_there_is_something_to_run():
    python = [block.text for block in blocks("README.md") if block.language == "python"]
    for name in ("AsyncEngine", "LLM", "openai"):
        assert any(name in text for text in python)
    assert any(block.text.startswith("curl") for block in blocks("README.md"))


def test_what_asks_a_server_comes_after_what_starts_one():
    assert README.index("make serve") < README.index("curl -N http://127.0.0.1:8000")


def test_the_make_targets_exist():
    pages = [README, (ROOT / "CONTRIBUTING.md").read_text(), (ROOT / "docs" / "install.md").read_text()]
    for page in pages:
        targets = re.findall(r"(?:^|`)make ([a-z-]+)", page, flags=re.MULTILINE)
        assert targets
        assert [target for target in targets if f"\n{target}:" not in MAKEFILE] == []


def test_make_says_what_it_would_do():
    """In the order in which it is told: set-up before the server, and the tests' packages for the tests alone."""
    plan = {
        target: subprocess.run(
            ["make", "--dry-run", "--always-make", target], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for target in ("setup", "serve", "test")
    }
    assert "scripts/setup.sh\n" in plan["setup"]
    assert plan["serve"].index("scripts/setup.sh\n") < plan["serve"].index("-m aserve --model demo")
    assert "scripts/setup.sh dev\n" in plan["test"]
    assert "scripts/setup.sh\n" not in plan["test"], "two installations, where one will do"


def program(name: str) -> Path:
    """As it was installed; a Python that has aserve in another way has none."""
    if not (BIN / name).exists():
        pytest.skip(f"{BIN} has no {name}")
    return BIN / name


def test_a_program_is_found_by_its_full_path_in_any_folder(tmp_path):
    done = subprocess.run(
        [str(program("aserve")), "--version"], cwd=tmp_path, env=FRESH, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"aserve {__version__}\n"


def test_an_activated_environment_finds_it_by_its_name_in_any_folder(tmp_path):
    program("aserve")
    script = f"source {program('activate')} && aserve --version && aserve serve --help && python -c 'import aserve'"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=FRESH, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"aserve {__version__}\nusage: aserve serve")


def test_what_cannot_be_set_up_says_why(tmp_path):
    """With a Python that is too old."""
    old = tmp_path / "python3.8"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.8.1" && exit 0\nexit 1\n')
    old.chmod(0o755)
    environ = {"PATH": "/usr/bin:/bin", "PYTHON": str(old)}
    done = subprocess.run(
        [str(ROOT / "scripts" / "setup.sh")], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == (f"setup: Python 3.11 or later is needed, but {old} is Python 3.8.1; set PYTHON to another\n")

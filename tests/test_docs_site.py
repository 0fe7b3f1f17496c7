"""The documentation as a site: built strictly, with all that it should have, and no word to other hosts."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from aserve.cli.command_table import ALL_NAMES

ROOT = Path(__file__).parent.parent

pytestmark = [pytest.mark.thorough, pytest.mark.slow]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` does, which also installs what it needs."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_there(site):
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / name).exists() or (name.name == "README.html" and (site / name.with_name("index.html")).exists())


def test_nothing_is_asked_of_other_hosts(site):
    """By a page that is shown: a link may lead there."""
    fetched = re.compile(r"""<(?:script|img|iframe|source|link)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^"'> ]+""")
    found = {hit for page in site.rglob("*.html") for hit in fetched.findall(page.read_text())}
    assert found == set()
    assert not any("@import" in sheet.read_text() for sheet in site.rglob("*.css"))


def test_the_reference_has_docstrings_and_flags(site):
    python = (site / "reference" / "python.html").read_text()
    assert "A model inside your event loop" in python
    for name in ("AsyncEngine.chat", "LLM.generate", "create_app"):
        assert f".{name}" in python or f'{name}"' in python, name
    flags = (site / "reference" / "flags.html").read_text()
    assert [name for name in ALL_NAMES if f"--{name.replace('_', '-')}" not in flags] == []
    assert "\\|" not in flags


def test_it_can_be_searched(site):
    assert "paged" in (site / "search" / "search_index.json").read_text()

"""docs/ and README.md: what they show runs as it is written there, and what they point to exists."""

import re
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import pytest

from tests.doc_pages import ROOT, Reader, Workshop, blocks

RUN_PAGES = [
    "README.md",
    *sorted(
        str(path.relative_to(ROOT)) for name in ("tutorial", "guides") for path in (ROOT / "docs" / name).glob("*.md")
    ),
    "docs/install.md",
]
PAGES = [
    *sorted(path for path in ROOT.glob("*.md")),
    *sorted(path for path in (ROOT / "docs").rglob("*.md")),
]
NOT_RUN: dict[str, int] = {
    "README.md": 1,
    "docs/guides/operate.md": 3,
    "docs/guides/replicas.md": 1,
    "docs/guides/routing.md": 1,
    "docs/guides/serve.md": 1,
    "docs/install.md": 3,
}
"""By page, how many blocks are not run; each says why, in the comment before it."""
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Generator[Workshop]:
    """Ends after the last page."""
    with closing(Workshop(tmp_path_factory.mktemp("bin"))) as workshop:
        yield workshop


FIRST_READ = ("README.md", "docs/tutorial/server.md")
"""What runs with every test; the other pages are thorough."""


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page if page in FIRST_READ else pytest.param(page, marks=pytest.mark.thorough) for page in RUN_PAGES]
)
def test_what_a_page_shows_runs(page, tmp_path, workshop):
    """From the top to the bottom, in an empty folder."""
    with closing(Reader(tmp_path, workshop)) as reader:
        for block in blocks(page):
            if block.not_run is None:
                reader.run(block)


def test_what_is_not_run_is_known_and_says_why():
    found = {page: [block for block in blocks(page) if block.not_run is not None] for page in RUN_PAGES}
    assert {page: len(those) for page, those in found.items() if those} == NOT_RUN
    assert all(len(block.not_run) > 10 for those in found.values() for block in those)


def test_there_is_something_to_run():
    languages = [block.language for page in RUN_PAGES for block in blocks(page) if block.not_run is None]
    assert languages.count("python") >= 12
    assert languages.count("bash") >= 20


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub and mkdocs make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    lost = []
    for target in LINK.findall(re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)):
        name, _, anchor = target.partition("#")
        if "://" in target or name.startswith("mailto:"):
            continue
        there = (page.parent / name).resolve() if name else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            lost.append(target)
    assert lost == []


def test_pages_of_the_site_link_to_pages_of_the_site():
    """The site has docs/ and nothing else."""
    docs = ROOT / "docs"
    outside = []
    for page in docs.rglob("*.md"):
        for target in LINK.findall(page.read_text()):
            there = (page.parent / target.partition("#")[0]).resolve()
            if "://" not in target and target[0] != "#" and docs not in there.parents:
                outside.append(f"{page.relative_to(ROOT)}: {target}")
    assert outside == []

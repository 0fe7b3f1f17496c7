"""The pages in a real Chromium, against a real server on the demonstration model; `make test-browser`.

CHROMIUM=/path names the browser; else it is looked for on the PATH, and where playwright keeps its own.
"""

import os
import shutil
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.browser.pages import Chat
from tests.e2e.server_process import ServerProcess

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BLOCK_BYTES = 16 * 1024
"""Of the demonstration model."""


@pytest.fixture(scope="session")
def browser():
    """One for all tests; each has a context of its own, which is a browser that has never been here."""
    playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-browser")
    with playwright_api.sync_playwright() as playwright:
        found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
        path = found or playwright.chromium.executable_path
        if not Path(path).exists():
            pytest.skip("there is no Chromium: apt-get install chromium, or CHROMIUM=/path/to/it")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server() -> Generator[ServerProcess]:
    yield from _serving()


@pytest.fixture(scope="session")
def small() -> Generator[ServerProcess]:
    """With little memory, so that there is something to see."""
    sizes = ["--kv-cache-memory-bytes", str(40 * BLOCK_BYTES), "--swap-space", "0.001", "--max-num-seqs", "8"]
    yield from _serving("--max-model-len", "256", *sizes)


@pytest.fixture(scope="session")
def one_row() -> Generator[ServerProcess]:
    """Where who comes second has to wait."""
    yield from _serving("--max-num-seqs", "1")


@pytest.fixture(scope="session")
def server_with_key() -> Generator[ServerProcess]:
    yield from _serving("--api-key", "sesame")


@pytest.fixture(scope="session")
def rooted_server() -> Generator[ServerProcess]:
    yield from _serving("--root-path", "/llm")


@pytest.fixture(scope="session")
def embedder() -> Generator[ServerProcess]:
    yield from _serving("--runner", "pooling")


def _serving(*arguments: str) -> Generator[ServerProcess]:
    started = ServerProcess("--model", "demo", "--port", "0", *arguments).wait_until_ready()
    try:
        yield started
    finally:
        started.close()


@pytest.fixture
def chat(browser, server):
    """The chat page as one finds it the first time, asked greedily, so that answers are the same each time."""
    yield from _chat(browser, server.url, settings={"numbers": {"temperature": 0}})


@pytest.fixture
def phone(browser, server):
    """The same on a phone."""
    yield from _chat(browser, server.url, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)


@pytest.fixture
def locked(browser, server_with_key):
    """The page of a server that asks for a key."""
    yield from _chat(browser, server_with_key.url)


@pytest.fixture
def rooted(browser, rooted_server):
    """The page of a server that is known by a longer address."""
    yield from _chat(browser, f"{rooted_server.url}/llm")


def _chat(browser, url, settings=None, **options):
    context = browser.new_context(accept_downloads=True, **options)
    chat = Chat(context, url, settings)
    yield chat
    context.close()
    chat.check()

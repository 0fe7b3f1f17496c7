"""The pages as files over HTTP: headers, ETags, keys, paths, and that they are small and ask nobody else."""

import json
import re
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from aserve import __version__
from aserve.http import AppOptions, create_app
from aserve.http.pages.static_pages import FOLDER, MEDIA_TYPES, PAGES, StaticPages
from tests.engines import scripted_engine
from tests.http.conftest import client_of

MAX_BYTES = 300 * 1024
THEME = "/ui/shared/theme.css"
SOURCES = sorted(path for path in FOLDER.rglob("*") if path.is_file())


def name_of(path: Path) -> str:
    return path.relative_to(FOLDER).as_posix()


@pytest.fixture
def pages():
    return StaticPages()


async def test_every_file_comes_with_its_type_and_its_headers(client, pages):
    assert {THEME, "/ui/pages.json"} < pages.paths
    for path in pages.paths:
        answer = await client.get(path)
        assert answer.status_code == 200, path
        suffix = Path(path).suffix if path.startswith("/ui/") else ".html"
        assert answer.headers["content-type"] == MEDIA_TYPES[suffix]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-cache"
        assert re.fullmatch('"[0-9a-f]{32}"', answer.headers["etag"])


async def test_the_policy_lets_nothing_in_but_files_of_the_server(client):
    policy = (await client.get(THEME)).headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["frame-ancestors"] == rules["form-action"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in policy
    assert "*" not in policy


async def test_what_a_browser_has_is_not_sent_again(client):
    etag = (await client.get(THEME)).headers["etag"]
    for tags in (etag, f"W/{etag}", f'"other", {etag}'):
        answer = await client.get(THEME, headers={"if-none-match": tags})
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", etag)
    for tags in ('"other"', etag[:-2] + '"', ""):
        assert (await client.get(THEME, headers={"if-none-match": tags})).status_code == 200


async def test_another_content_has_another_tag(tmp_path):
    tags = set()
    for text in ("a", "b"):
        (tmp_path / "chat").mkdir(exist_ok=True)
        (tmp_path / "chat" / "index.html").write_text(text)
        async with client_of(Starlette(routes=StaticPages(tmp_path).routes())) as client:
            answer = await client.get("/")
            assert answer.text == text
            tags.add(answer.headers["etag"])
    assert len(tags) == 2


async def test_pages_begin_alike(client):
    """Catches a page with a comment in the place of its head."""
    for path in PAGES:
        page = (await client.get(path)).text
        assert page.count("ui/shared/theme.css") == page.count("<meta charset") == 1
        assert "<!--" not in page


async def test_a_head_has_the_length_and_no_body(client, pages):
    for path in pages.paths:
        head, whole = await client.head(path), await client.get(path)
        assert (head.status_code, head.content) == (200, b"")
        for name in ("content-length", "content-type", "etag"):
            assert head.headers[name] == whole.headers[name]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
async def test_files_are_only_read(client, method):
    answer = await client.request(method, THEME)
    assert (answer.status_code, set(answer.headers["allow"].split(", "))) == (405, {"GET", "HEAD"})


@pytest.mark.parametrize(
    "path",
    [
        "/ui",
        "/ui/",
        "/ui/shared",
        "/ui/shared/",
        "/ui/chat/index.html",
        "/ui/static_pages.py",
        "/ui/../app.py",
        "/ui/%2e%2e/app.py",
        "/ui/..%2fapp.py",
        "/ui/..%5capp.py",
        "/ui/shared/..%2f..%2fstatic_pages.py",
        "/ui/shared//theme.css",
        "/ui//etc/passwd",
        "/ui/shared/theme.css%00",
        "/ui/shared/THEME.css",
    ],
)
async def test_only_exact_paths_are_there(engine, path):
    """The paths are sent as they stand here: httpx would tidy them up."""
    app = create_app(engine)
    sent = []
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "path": httpx.URL(f"http://aserve{path}").path if "%" in path else path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"aserve")],
    }

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    assert sent[0]["status"] == 404
    assert json.loads(sent[1]["body"])["error"]["code"] == "unknown_route"


async def test_pages_can_be_left_out(engine, pages):
    async with client_of(create_app(engine, options=AppOptions(ui=False))) as client:
        for path in pages.paths:
            assert (await client.get(path)).status_code == 404


async def test_files_need_no_key_and_all_else_does(engine, pages):
    """Catches a page that could not ask for the key, and one that opens what is beside it."""
    async with client_of(create_app(engine, api_keys=["key"])) as client:
        for path in pages.paths:
            assert (await client.get(path)).status_code == 200
        for path in ("/v1/models", "/ui/nothing", "/ui/shared/theme.css/", "/openapi.json"):
            assert (await client.get(path)).status_code == 401
    async with client_of(create_app(engine, api_keys=["key"], options=AppOptions(ui=False))) as client:
        assert (await client.get(THEME)).status_code == 401


async def test_they_are_served_before_a_model_is_there():
    async with client_of(create_app(scripted_engine())) as client:
        assert (await client.get(THEME)).status_code == 200


async def test_below_another_path(engine):
    mounted = Starlette(routes=[Mount("/llm", create_app(engine, api_keys=["key"]))])
    rooted = create_app(engine, options=AppOptions(root_path="/llm"), api_keys=["key"])
    for app in (mounted, rooted):
        async with client_of(app) as client:
            assert (await client.get(f"/llm{THEME}")).status_code == 200


async def test_the_navigation_names_the_pages_that_are_there(client, pages):
    found = (await client.get("/ui/pages.json")).json()
    assert found["version"] == __version__
    assert [page["path"] for page in found["pages"]] == [path[1:] or "./" for path in PAGES if path in pages.paths]


async def test_each_page_of_a_folder_is_served_and_linked(tmp_path):
    for _, name in PAGES.values():
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text(name)
    pages = StaticPages(tmp_path)
    assert pages.paths == {*PAGES, "/ui/pages.json"}
    async with client_of(Starlette(routes=pages.routes())) as client:
        for path, (_, name) in PAGES.items():
            assert (await client.get(path)).text == name
        assert [page["title"] for page in (await client.get("/ui/pages.json")).json()["pages"]] == ["Chat", "Inspect"]


def test_all_files_are_of_a_known_type_and_small_together(pages):
    """Catches a file that is in the folder and is not served."""
    assert {path.suffix for path in SOURCES} <= set(MEDIA_TYPES)
    assert pages.num_bytes <= MAX_BYTES
    assert len(pages.paths) == len(SOURCES)  # pages.json is made, and what pages share is in each


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_other_host_is_named_and_nothing_is_inline(path):
    """SVG's namespace is a name and no address. Relative URLs work wherever the page is mounted."""
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(?:https?:)?//[\w.-]+\.[a-z]{2,}", text)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser", text
    )
    if path.suffix == ".html":
        assert not re.search(r"""\s(?:on\w+|style)\s*=|<style|<script(?![^>]*\ssrc=)""", text)
        assert not re.search(r"""(?:href|src)\s*=\s*["']/""", text)


@pytest.mark.parametrize("path", [path for path in SOURCES if path.suffix in (".js", ".css", ".html")], ids=name_of)
def test_sources_are_readable(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 400
    assert max(map(len, lines)) <= 120

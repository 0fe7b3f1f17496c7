"""StaticPages: the files of a folder as web pages, each a fixed answer that is made when the application is.

    static/chat/index.html      /              a page; which, is told by PAGES
    static/chat/main.js         /ui/chat/main.js
    static/shared/theme.css     /ui/shared/theme.css
    static/shared/head.html     in each page, where a comment names it
                                /ui/pages.json, made here: which pages there are, for their navigation

A request names a file by its whole path or gets a 404: no path is ever looked up on the disk. Pages refer to all by
relative URLs, so that they work wherever they are mounted, and to no other host, which browsers hold them to.
"""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from aserve import __version__
from aserve.http.errors import HttpError

FOLDER: Final = Path(__file__).parent / "static"
PAGES: Final[Mapping[str, tuple[str, str]]] = {"/": ("Chat", "chat"), "/inspect": ("Inspect", "inspect")}
"""By path: the title in the navigation, and the folder whose index.html it is."""
HEAD: Final = b"    <!-- shared/head.html -->\n"
"""Stands for what the pages' heads have in common."""
FILES_PATH: Final = "/ui/{file:path}"
"""The route of all files that are no pages."""
MEDIA_TYPES: Final[Mapping[str, str]] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("connect", "img", "script", "style")),
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # text becomes HTML nowhere: innerHTML and its like raise
        "trusted-types 'none'",
    )
)
"""The Content-Security-Policy of all pages. Scripts and styles are files; what a model writes can be neither."""
HEADERS: Final[Mapping[str, str]] = {
    "Cache-Control": "no-cache",  # kept, and asked for by its ETag each time: a new version shows at once
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file. etag: of what is in it, quoted."""

    content: bytes
    media_type: str
    etag: str

    @classmethod
    def of(cls, content: bytes, suffix: str) -> "StaticFile":
        """With a suffix of `MEDIA_TYPES`."""
        return cls(content, MEDIA_TYPES[suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


class StaticPages:
    """The pages of a folder, as far as they are in it. Read once: later changes of the files are not seen."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {
            f"/ui/{path.relative_to(folder).as_posix()}": StaticFile.of(path.read_bytes(), path.suffix)
            for path in sorted(folder.rglob("*"))
            if path.suffix in MEDIA_TYPES
        }
        self._titles: dict[str, str] = {}
        head = self._files.pop("/ui/shared/head.html", StaticFile(b"", "", "")).content
        for path, (title, name) in PAGES.items():
            if (page := self._files.pop(f"/ui/{name}/index.html", None)) is not None:
                self._files[path] = StaticFile.of(page.content.replace(HEAD, head), ".html")
                self._titles[path] = title
        self._files["/ui/pages.json"] = StaticFile.of(self._navigation(), ".json")

    @property
    def paths(self) -> frozenset[str]:
        """All that is served, each exactly so."""
        return frozenset(self._files)

    @property
    def num_bytes(self) -> int:
        """Of all files together."""
        return sum(len(file.content) for file in self._files.values())

    def routes(self) -> list[Route]:
        """A route for each page, and one for all other files."""
        return [
            *(Route(path, self._page(path), include_in_schema=False) for path in self._titles),
            Route(FILES_PATH, self._show_file, include_in_schema=False),
        ]

    def answer(self, path: str, request: Request) -> Response:
        """The file, or 304 where the client has it. Raises `HttpError` (404) for a path that is none of `paths`."""
        file = self._files.get(path)
        if file is None:
            raise HttpError(404, "unknown_route", "there is nothing at this path")
        headers = {**HEADERS, "ETag": file.etag}
        if file.etag in _tags(request.headers.get("if-none-match", "")):
            return Response(status_code=304, headers=headers)
        if request.method == "HEAD":
            headers["Content-Length"] = str(len(file.content))
            return Response(headers=headers, media_type=file.media_type)
        return Response(file.content, headers=headers, media_type=file.media_type)

    def _navigation(self) -> bytes:
        pages = [{"path": path[1:] or "./", "title": title} for path, title in self._titles.items()]
        return msgspec.json.encode({"version": __version__, "pages": pages})

    def _page(self, path: str) -> Callable[[Request], Awaitable[Response]]:
        async def show(request: Request) -> Response:
            return self.answer(path, request)

        return show

    async def _show_file(self, request: Request) -> Response:
        return self.answer(f"/ui/{request.path_params['file']}", request)


def _tags(if_none_match: str) -> list[str]:
    """Of the header, without the mark of weak ones: a proxy that compresses adds it."""
    return [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]

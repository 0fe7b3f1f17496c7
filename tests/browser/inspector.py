"""The inspector as a reader has it in front of him, and what went wrong in it."""

import json
from collections.abc import Generator
from typing import Any

import pytest

STORY = "Once upon a time there was a small house on a hill above the sea, and in it lived a man who built ships. "
WIDE = {"width": 1440, "height": 1000}
READ_OFTEN = """
const getContext = HTMLCanvasElement.prototype.getContext;
HTMLCanvasElement.prototype.getContext = function (kind) {
  return getContext.call(this, kind, { willReadFrequently: true });
};
"""
"""Canvases whose colours are counted: Chromium warns of others."""


class Inspector:
    """The page, and what went wrong in it. explanations: the ids of the requests that it asked the server about."""

    def __init__(self, context: Any, url: str, path: str) -> None:
        self.problems: list[str] = []
        self.explanations: list[str] = []
        self._url = url
        self.page = context.new_page()
        self.page.on("console", self._told)
        self.page.add_init_script(READ_OFTEN)
        self.page.on("pageerror", lambda error: self.note(str(error)))
        self.page.on("request", lambda request: self._requested(request.url))
        self.page.goto(url + path)

    def note(self, problem: str) -> None:
        self.problems.append(problem)

    def _told(self, message: Any) -> None:
        """By the console. A request that the page asks about may have ended on the way, and nothing be known of it."""
        has_ended = "404" in message.text and "/v1/requests/" in message.location["url"]
        if message.type in ("error", "warning") and not has_ended:
            self.note(f"{message.text} {message.location['url']}")

    def _requested(self, url: str) -> None:
        if "/v1/requests/" in url:
            self.explanations.append(url.rpartition("/")[2])
        if not url.startswith((self._url, "blob:")):
            self.note(url)

    def value(self, expression: str) -> Any:
        return self.page.evaluate(expression)

    def wait(self, condition: str, timeout_s: float = 120.0) -> None:
        """Until an expression is true; playwright's own way to wait the page's policy forbids."""
        for _ in range(int(timeout_s * 20)):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"it does not come to {condition}")

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def open_request(self, request_id: str) -> None:
        """Click the request with that id, which has to be in the list."""
        number = f"[...inspector.lives.bySeq.values()].find((one) => one.card.id === {json.dumps(request_id)})?.seq"
        self.wait(f"document.querySelector(`#requests button[data-seq='${{{number}}}']`)")
        self.page.click(f"#requests button[data-seq='{self.value(number)}']")
        self.page.wait_for_selector("#request[open]")

    def told(self, list_id: str = "explanation") -> dict[str, str]:
        """What a list of facts says, by its names."""
        assert self.page.is_visible("#request")
        pairs = f"document.querySelectorAll('#{list_id} > div')"
        return {
            name: value.replace("\xa0", " ")
            for name, value in self.value(f"[...{pairs}].map((one) => [...one.children].map((each) => each.innerText))")
        }

    def colours_in(self, selector: str) -> int:
        """How many colours a canvas has."""
        return self.value(
            f"""(() => {{
              const canvas = document.querySelector("{selector}");
              const {{ data }} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
              return new Set(new Uint32Array(data.buffer)).size;
            }})()"""
        )


def opened(
    browser: Any, url: str, path: str = "/inspect", *, key: str | None = None, **options: Any
) -> Generator[Inspector]:
    """In a browser of its own. key: one that was given before in this tab. At the end nothing may have gone wrong."""
    context = browser.new_context(**{"viewport": WIDE, "accept_downloads": True} | options)
    if key is not None:
        context.add_init_script(f"sessionStorage['aserve.key'] = {json.dumps(key)}")
    context.set_default_timeout(120_000)  # of a machine that has much else to do
    inspector = Inspector(context, url, path)
    yield inspector
    context.close()
    assert not inspector.problems, inspector.problems


def axe_of(page: Any) -> list[str]:
    """What axe complains of."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in axe.run(page).response["violations"]]

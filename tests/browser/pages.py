"""The chat page as a reader has it in front of him: what he does, and what he sees."""

import json
import re
from typing import Any

CHAT = "**/v1/chat/completions"
REFUSED_LOADS = re.compile(r"Failed to load resource: (the server responded with a status of [45]\d\d|net::ERR_FAILED)")
"""What the browser itself says of answers that are errors."""


class Chat:
    """One browser, with one page. check: the page must have asked no other host, and complained of nothing.

    settings: those with which conversations begin.
    """

    def __init__(self, context: Any, url: str, settings: dict[str, Any] | None = None) -> None:
        self.context = context
        self.url = f"{url}/"
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        context.set_default_timeout(60_000)  # of a machine that has much else to do
        self.page = context.new_page()
        if settings is not None:
            stored = f"localStorage['aserve.chat.settings'] ??= {json.dumps(json.dumps(settings))}"
            context.add_init_script(stored)
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._requested)

    def open(self, path: str = "") -> "Chat":
        """Until one can write."""
        self.page.goto(self.url + path)
        self.page.wait_for_selector("#empty h2", state="attached")
        return self

    def check(self) -> None:
        assert self.complaints == []
        assert [url for url in self.requests if not url.startswith((self.url, "blob:"))] == []

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning") and not REFUSED_LOADS.match(message.text):
            self.complaints.append(message.text)

    def _requested(self, request: Any) -> None:
        self.requests.append(request.url)
        if request.url.endswith("/v1/chat/completions"):
            self.bodies.append(json.loads(request.post_data))

    # What the reader does.

    def say(self, text: str) -> None:
        """And wait for the answer's end."""
        self.page.fill("#message", text)
        self.page.click("[data-send]")
        self.wait()

    def wait(self) -> None:
        self.page.wait_for_selector("[data-send]:not(.at-work)")
        self.until("!document.querySelector('[aria-busy=true]')")

    def until(self, condition: str, within_ms: int = 60_000) -> None:
        """Until an expression of JavaScript is true; playwright's own way to wait the page's policy forbids."""
        for _ in range(within_ms // 20):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(20)
        raise AssertionError(f"it does not come to {condition}")

    def act(self, name: str, message: int = -1) -> None:
        """Press the button of that name beneath a message."""
        messages = self.page.locator(".message")
        chosen = messages.nth(message) if message >= 0 else messages.last
        chosen.hover()
        chosen.get_by_role("button", name=name, exact=True).click()

    def setting(self, label: str) -> Any:
        """The field of that name, the settings being opened if they are not."""
        if not self.page.is_visible("#settings"):
            self.page.click("[data-opens=settings]")
        return self.page.get_by_label(label, exact=True)

    def close_settings(self) -> None:
        self.page.click("[data-closes=settings]")

    def answers_with(self, *deltas: dict[str, Any], status: int = 200, **others: Any) -> None:
        """From now on the server's answers are these: the deltas of a stream, or a body with another status."""
        if status == 200:
            self.answers_by(stream_of(*deltas, **others))
        else:
            self._fulfil(
                status=status, content_type="application/json", body=json.dumps({"error": deltas[0]}), **others
            )

    def answers_by(self, stream: str) -> None:
        """From now on the server's answers are this stream."""
        self._fulfil(content_type="text/event-stream", body=stream)

    def _fulfil(self, **answer: Any) -> None:
        self.page.unroute(CHAT)
        self.page.route(CHAT, lambda route: route.fulfill(**answer))

    # What the reader sees.

    def answers(self) -> list[str]:
        return self.page.locator(".message.answer .prose:visible, .message.answer .tokens:visible").all_inner_texts()

    def questions(self) -> list[str]:
        return self.page.locator(".bubble").all_inner_texts()

    def facts(self) -> str:
        return self.page.locator(".facts:visible").last.inner_text()

    def cached(self) -> int:
        """Tokens of the last prompt that were in the cache, as the page says."""
        found = re.search(r"(\d+) from the cache", self.facts())
        return int(found[1]) if found else 0

    def conversations(self) -> list[str]:
        return self.page.locator(".conversation").all_inner_texts()


def stream_of(*deltas: dict[str, Any], finish: str = "stop", usage: dict[str, Any] | None = None) -> str:
    """A stream as a server sends it, with deltas of the first choice."""
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    events: list[dict[str, Any]] = [{"choices": [choice]} for choice in choices]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    if usage is not None:
        events.append({"choices": [], "usage": usage})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

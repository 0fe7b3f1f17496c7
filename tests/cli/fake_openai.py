"""A server that speaks enough of OpenAI's API to be asked, and does what the question tells it to do wrong."""

import json
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MARKDOWN = "# Title\n\nSome **bold** text.\n\n- one\n- two\n\n```python\nprint(1)\n```\n\nThe end."


class FakeOpenAI(ThreadingHTTPServer):
    """Answers each question by its last word; see `ANSWERS`. bodies: what was asked. key: that it wants, if any."""

    daemon_threads = True

    def __init__(self, models: tuple[str, ...] = ("fake-1", "fake-2"), key: str | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models = models
        self.key = key
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: FakeOpenAI
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Nowhere."""

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        if self.refuses():
            return
        if self.path == "/v1/models":
            self.whole(200, {"data": [{"id": name} for name in self.server.models]})
        elif self.path == "/garbage/models":
            self.whole(200, ["no", "models"])
        else:
            self.whole(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        self.server.paths.append(self.path)
        if self.refuses():
            return
        asked = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        ANSWERS.get(asked.split()[-1] if asked.split() else "", say)(self, asked)

    def refuses(self) -> bool:
        if self.server.key is None or self.headers.get("authorization") == f"Bearer {self.server.key}":
            return False
        self.whole(401, {"error": {"message": "no such key"}})
        return True

    def whole(self, status: int, body: Any, **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def begin(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    def event(self, **fields: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n")
        self.wfile.flush()

    def piece(self, text: str, field: str = "content") -> None:
        chat = {"delta": {field: text}} if self.path.endswith("chat/completions") else {"text": text}
        self.event(choices=[{"index": 0, **chat}])

    def done(self, num_tokens: int = 3, reason: str = "stop") -> None:
        chat = {"delta": {}} if self.path.endswith("chat/completions") else {"text": ""}
        self.event(choices=[{"index": 0, **chat, "finish_reason": reason}])
        self.event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": num_tokens})
        self.wfile.write(b"data: [DONE]\n\n")


def say(handler: Handler, asked: str) -> None:
    handler.begin()
    for piece in ("You ", "said: ", asked):
        handler.piece(piece)
    handler.done()


def cut(handler: Handler, _asked: str) -> None:
    handler.begin()
    handler.piece("This is cut ")
    handler.piece("here")


def busy(handler: Handler, _asked: str) -> None:
    handler.whole(429, {"error": {"message": "too many requests"}}, Retry_After="7")


def broken(handler: Handler, _asked: str) -> None:
    handler.whole(500, b"<html>\x1b[31mInternal Server Error</html>", Content_Type="text/html")


def garbage(handler: Handler, _asked: str) -> None:
    handler.begin()
    handler.piece("Good so far. ")
    handler.wfile.write(b'data: {"choices": [{]\n\n')


def faulty(handler: Handler, _asked: str) -> None:
    handler.begin()
    handler.piece("Half ")
    handler.event(error={"message": "a step failed", "code": "step_failed"})


def page(handler: Handler, _asked: str) -> None:
    handler.whole(200, b"<html>a login page</html>", Content_Type="text/html")


def think(handler: Handler, _asked: str) -> None:
    handler.begin()
    handler.piece("let me see", "reasoning_content")
    handler.piece("Yes.")
    handler.done(2)


def unstreamed(handler: Handler, _asked: str) -> None:
    message = {"message": {"role": "assistant", "content": "All at once."}, "finish_reason": "length"}
    handler.whole(200, {"choices": [message], "usage": {"prompt_tokens": 1, "completion_tokens": 4}})


def endless(handler: Handler, _asked: str) -> None:
    handler.begin()
    try:
        while True:
            handler.piece("word ")
            time.sleep(0.02)
    except OSError:
        handler.server.paths.append("left")


def markdown(handler: Handler, _asked: str) -> None:
    handler.begin()
    for start in range(0, len(MARKDOWN), 5):
        handler.piece(MARKDOWN[start : start + 5])
    handler.done(20)


def escapes(handler: Handler, _asked: str) -> None:
    handler.begin()
    handler.piece("a\x1b[2Jb\x9bc\u2028d")
    handler.done(1)


ANSWERS: dict[str, Callable[[Handler, str], None]] = {
    "cut": cut,
    "busy": busy,
    "broken": broken,
    "garbage": garbage,
    "faulty": faulty,
    "page": page,
    "think": think,
    "unstreamed": unstreamed,
    "endless": endless,
    "markdown": markdown,
    "escapes": escapes,
}


@contextmanager
def fake_openai(*models: str, key: str | None = None) -> Generator[FakeOpenAI]:
    """A server in a thread."""
    server = FakeOpenAI(models or ("fake-1", "fake-2"), key)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

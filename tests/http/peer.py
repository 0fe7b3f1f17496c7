"""An ASGI client driven by hand: it sees each message as it is sent, and leaves when it likes."""

import asyncio
import json


class Peer:
    """One request. `sent` is all that the application has sent so far; `leave` is the client's departure.

    body: None never comes. breaks_after: so many messages are sent, then a send raises.
    """

    def __init__(self, app, path, body, *, breaks_after=None):
        self._app = app
        self._scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"host", b"aserve"), (b"content-type", b"application/json")],
        }
        self._incoming = asyncio.Queue()
        if body is not None:
            self._incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        self._changed = asyncio.Condition()
        self._accepting = asyncio.Event()
        self._accepting.set()
        self._breaks_after = breaks_after
        self.sent = []

    def start(self):
        """The application's task for this request."""
        return asyncio.create_task(self._app(self._scope, self._incoming.get, self._send))

    async def _send(self, message):
        await self._accepting.wait()
        if len(self.sent) == self._breaks_after:
            raise BrokenPipeError
        async with self._changed:
            self.sent.append(message)
            self._changed.notify_all()

    async def receive_messages(self, count):
        """Wait until so many messages have been sent."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.sent) >= count)

    def stop_reading(self):
        """From now on every send waits for ever."""
        self._accepting.clear()

    def read_on(self):
        """Take what has been waiting, and all that comes."""
        self._accepting.set()

    def leave(self):
        """Close the connection."""
        self._incoming.put_nowait({"type": "http.disconnect"})

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def text(self):
        """The body so far."""
        return b"".join(message.get("body", b"") for message in self.sent[1:]).decode()


async def until(condition):
    """Let the loop turn until something is so."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  the condition is the scheduler's, which sets no event
            await asyncio.sleep(0)

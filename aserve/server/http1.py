"""Hypercorn's HTTP/1.1 protocol, kept to HTTP/1.1.

Hypercorn turns a connection's bytes into ASGI calls and back; it has switches for none of these:
- `Upgrade: h2c`, the HTTP/2 preface and `Upgrade: websocket` would leave HTTP/1.1, behind the back of a proxy that
  checked the first request only, and into code whose faults in one stream end its siblings;
- a target in absolute form (`GET http://host/path`) would be taken for a path (RFC 9112, section 3.2.2);
- errors found while parsing are answered without a body;
- what an application raises would be printed, text and all.

A response of unknown length can be written directly, see aserve/http/direct.py: its pieces are then framed here, as h11
frames them (RFC 9112, section 7.1), whose state a piece does not change.
"""

import logging
import re
import sys
from collections.abc import Callable
from typing import Any, Final

import h11
from hypercorn.config import Config
from hypercorn.protocol.events import Body, Event, Response
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.typing import ConnectionState

from aserve.core.faults import report
from aserve.http.access import log_access
from aserve.http.direct import STATE_KEY, DirectLine
from aserve.http.errors import HttpError, error_body
from aserve.http.ops import LEAVING_KEY
from aserve.server.strict import StrictConnection

_log = logging.getLogger(__name__)

_CLOSE: Final = (b"connection", b"close")
_MESSAGES: Final = {
    414: "the URL is too long",
    431: "the request's headers are too large",
    501: "this method, in this spelling, or this Transfer-Encoding is not implemented",
}
_ABSOLUTE: Final = re.compile(rb"https?://([^/?]*)(.*)", re.IGNORECASE)


class Http1(H11Protocol):  # type: ignore[misc]  # Hypercorn is not typed for mypy
    """One connection's requests, one at a time. While the server drains, each answer says that it is the last.

    arguments: H11Protocol's, but for the ConnectionState. is_clear, write_chunk: the connection's, as a DirectLine's.
    hold_head: called before the head of an answer is sent.
    """

    def __init__(
        self,
        *arguments: Any,
        is_clear: Callable[[], bool],
        write_chunk: Callable[[bytes], bool],
        hold_head: Callable[[], None],
    ) -> None:
        app, config, context, group, *rest = arguments
        self._line = DirectLine()
        state = ConnectionState({STATE_KEY: self._line, LEAVING_KEY: context.terminate.is_set})
        super().__init__(app, config, context, group, state, *rest)
        self.connection = StrictConnection(h11.SERVER, max_incomplete_event_size=config.h11_max_incomplete_size)
        self._is_clear = is_clear
        self._write_chunk = write_chunk
        self._hold_head = hold_head
        self._is_chunked = False

    @property
    def answering(self) -> bool:
        """Whether a request has been received to its end, so that what comes now waits for its answer's end."""
        return self.connection.their_state not in (h11.IDLE, h11.SEND_BODY)

    @property
    def is_fresh(self) -> bool:
        """Whether the next byte to be received begins a request, and none before it waits for its answer."""
        connection = self.connection
        is_idle = connection.their_state is h11.IDLE and connection.our_state is h11.IDLE
        return is_idle and not connection.trailing_data[0]

    async def _check_protocol(self, event: h11.Request) -> None:
        """Never leave HTTP/1.1, whatever the request asks for."""

    async def _create_stream(self, request: h11.Request) -> None:
        await super()._create_stream(_plain(request))

    async def stream_send(self, event: Event) -> None:
        """Pass an application's event on to the client."""
        if isinstance(event, Response):
            if self.connection.our_state is h11.SEND_BODY:
                return  # hypercorn would answer anew, behind a head that was lost on its way
            if self.context.terminated.is_set():
                headers = [(name, value) for name, value in event.headers if name.lower() != b"connection"]
                event = Response(event.stream_id, headers=[*headers, _CLOSE], status_code=event.status_code)
            self._is_chunked = self._frames_by_chunks(event)
            self._hold_head()
        elif not isinstance(event, Body):
            self._line.disconnect()
        await super().stream_send(event)
        if isinstance(event, Body) and self._is_chunked and self._line.is_requested_by(event.data):
            self._line.connect(self._is_clear, self._write_chunk)

    def _frames_by_chunks(self, response: Response) -> bool:
        """Whether h11 sends the response's body in chunks: it has any, of unknown length, and the client knows them."""
        if self.stream is None:
            return False  # the client has left, and the application answers all the same
        has_body = response.status_code >= 200 and response.status_code not in (204, 304)
        has_length = any(name.lower() == b"content-length" for name, _ in response.headers)
        is_known = self.stream.scope["http_version"] >= "1.1"
        return has_body and is_known and not has_length and self.stream.scope["method"] not in ("HEAD", "CONNECT")

    async def _send_error_response(self, status_code: int) -> None:
        unread, _ = self.connection.trailing_data
        if status_code == 431 and b"\n" not in unread:
            status_code = 414  # h11 says 431 of any head that is too long; this one is still in its first line
        message = _MESSAGES.get(status_code, "this is not a valid HTTP/1.1 request")
        error = HttpError(status_code, "bad_request", message)
        log_access(logging.INFO, status=status_code, error=error.code)
        body = error_body(error)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            _CLOSE,
            *self.config.response_headers("h11"),
        ]
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


def _plain(request: h11.Request) -> h11.Request:
    """A request as if it asked for no upgrade, and named its host in a header and nothing but a path as its target."""
    absolute = _ABSOLUTE.fullmatch(request.target)
    headers = [(name, value) for name, value in request.headers if name != b"upgrade"]
    if absolute is None and len(headers) == len(request.headers):
        return request
    target = request.target
    if absolute is not None:
        host, target = absolute.groups()
        target = target if target.startswith(b"/") else b"/" + target
        headers = [(b"host", host), *((name, value) for name, value in headers if name != b"host")]
    return h11.Request(method=request.method, target=target, http_version=request.http_version, headers=headers)


class _FaultLog:
    """In the place of Hypercorn's log."""

    def __init__(self, _config: Config) -> None:
        pass

    async def access(self, *_what: object) -> None:
        """Nothing: see aserve/http/access.py."""

    async def exception(self, _message: str) -> None:
        """An application has raised."""
        error = sys.exception()
        assert error is not None, "called where an exception is handled"
        report(_log, "the application", error)


def hypercorn_config() -> Config:
    """What Hypercorn is told. Its own timeouts, its listener and its shutdown are not used; see connection.py."""
    config = Config()
    config.logger_class = _FaultLog
    config.include_server_header = False
    config.h11_max_incomplete_size = 16 * 1024
    return config

"""What the streams of chat completions and of completions have in common: their chunks' ends, and [DONE]."""

from typing import Any, Final

import msgspec

from aserve.core.errors import AserveError
from aserve.http.errors import error_body
from aserve.http.explaining import NOTHING, Told
from aserve.http.sse import event

DONE: Final = event(b"[DONE]")


class Chunks:
    """Half a `Wire`. head: how each chunk begins, up to its choices."""

    def __init__(self, head: bytes) -> None:
        self._head = head

    def end(self, usage: dict[str, Any] | None, told: Told = NOTHING) -> bytes:
        """The chunk without choices, which has the token counts if they are asked for, and the last event."""
        if usage is None and not told:
            return DONE
        others = b"," + msgspec.json.encode(told)[1:-1] if told else b""
        return self._head + b',"choices":[]' + usage_suffix(usage) + others + b"}\n\n" + DONE

    def failure(self, error: AserveError) -> bytes:
        """The error's object, and the last event."""
        return event(error_body(error)) + DONE


def usage_suffix(usage: dict[str, Any] | None) -> bytes:
    """The member of a JSON object that says the token counts, if there are any to say."""
    return b"" if usage is None else b',"usage":' + msgspec.json.encode(usage)

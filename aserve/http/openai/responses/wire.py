"""ResponseWire: a response as one object, and as the events of its stream.

    response.created, response.in_progress, events of the output's items ..., response.completed | incomplete | failed
                    '--> response.queued --> (in the background)

Each is an SSE event with its name, and a sequence_number that counts from 0.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from aserve.core.errors import AserveError
from aserve.core.outputs import DEADLINE, Completion, FinishReason, TextDelta
from aserve.core.plan import TokenScores
from aserve.http.errors import error_body
from aserve.http.explaining import NOTHING, Told
from aserve.http.generation import Usage
from aserve.http.openai.responses.output import Event, Output
from aserve.http.tally import TokenIds

_encode: Final = msgspec.json.encode

Response = dict[str, Any]

TERMINAL: Final = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "failed": "response.failed",
    "cancelled": "response.incomplete",
}
"""By its status at the end, the last event of a stream; OpenAI's types have none of their own for a cancelled one."""


class ResponseWire:
    """A `Wire` of one response. response: as it is so far; `is_over` when nothing of it changes any more.

    num_events: that were made, which is the number of the next.
    """

    def __init__(self, response: Response, output: Output) -> None:
        self.response = response
        self._output = output
        self.num_events = 0
        self._finish: tuple[FinishReason, int | str | None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has ended, one way or another."""
        return self.response["status"] in TERMINAL

    def opening(
        self, index: int, prompt_token_ids: TokenIds, prompt_scores: Sequence[TokenScores], usage: Usage | None
    ) -> bytes:
        """What comes before any item."""
        created = b"" if self.num_events else self._event({"type": "response.created", "response": self.response})
        self.response = {**self.response, "status": "in_progress"}
        return created + self._event({"type": "response.in_progress", "response": self.response})

    def queue(self) -> bytes:
        """What comes before the opening of a response that waits."""
        kinds = ("response.created", "response.queued")
        return b"".join(self._event({"type": kind, "response": self.response}) for kind in kinds)

    def delta(self, delta: TextDelta, usage: Usage | None) -> bytes:
        """The events of more text; all that are left if it is the last."""
        events = self._output.feed(delta.text, delta.token_ids, delta.scores)
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason, delta.stop_reason
            events += self._output.end(delta.finish_reason)
        return self._told(events)

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """None: every event has a number."""
        return None

    def end(self, usage: Usage | None, told: Told = NOTHING) -> bytes:
        """The last event, with the whole response."""
        assert self._finish is not None, "the end follows the last delta"
        self._settle(*self._finish, usage)
        self.response |= told
        return self._last()

    def failure(self, error: AserveError) -> bytes:
        """What is left to tell of the items, the error, and that the response failed."""
        opening = self._unless_opened()
        told = self._told(self._output.end(None))
        fields = msgspec.json.decode(error_body(error))["error"]
        shown = {name: fields[name] for name in ("code", "message")}
        self.response = {**self.response, "status": "failed", "error": shown, "output": self._output.items}
        event = {"type": "error", **shown, "param": fields["param"]}
        return opening + told + self._event(event) + self._last()

    def cancel(self) -> bytes:
        """What is left to tell of the items, and that nothing more comes."""
        opening = self._unless_opened()
        told = self._told(self._output.end(FinishReason.ABORT))
        self.response = {**self.response, "status": "cancelled", "output": self._output.items}
        return opening + told + self._last()

    def whole(self, completions: Sequence[Completion], usage: Usage) -> Response:
        """The response object."""
        (completion,) = completions
        self._output.feed(completion.text, completion.token_ids, completion.scores)
        self._output.end(completion.finish_reason)
        self._settle(completion.finish_reason, completion.stop_reason, usage)
        return self.response

    def _unless_opened(self) -> bytes:
        return b"" if self.num_events else self.opening(0, (), (), None)

    def _settle(self, finish_reason: FinishReason, stop_reason: int | str | None, usage: Usage | None) -> None:
        status, details = "completed", None
        if finish_reason is FinishReason.LENGTH:
            status = "incomplete"
            details = {"reason": "deadline" if stop_reason == DEADLINE else "max_output_tokens"}
        elif finish_reason is not FinishReason.STOP:
            status = "cancelled"
        self.response = {
            **self.response,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": details,
            "output": self._output.items,
            "usage": None if usage is None else _usage(usage, self._output.num_reasoning_tokens),
        }

    def _last(self) -> bytes:
        return self._event({"type": TERMINAL[self.response["status"]], "response": self.response})

    def _told(self, events: Sequence[Event]) -> bytes:
        return b"".join(map(self._event, events))

    def _event(self, fields: Event) -> bytes:
        numbered = {**fields, "sequence_number": self.num_events}
        self.num_events += 1
        return b"event: %b\ndata: %b\n\n" % (fields["type"].encode(), _encode(numbered))


def _usage(usage: Mapping[str, Any], num_reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage["total_tokens"],
    }

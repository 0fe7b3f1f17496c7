"""What an answer of /v1/completions says: when each token came, and how many there were. No I/O.

A token event is one with a choice that has text, or that has neither text nor an end: the text of a token whose bytes
do not complete a character is empty. A closing event without text is none.
"""

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from aserve.load.http import Answer, AnswerError


class Choice(msgspec.Struct):
    """One choice of an event, or of a whole answer."""

    text: str | None = None
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    """The token counts of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Event(msgspec.Struct):
    """One event of a stream, or a whole answer."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


DECODER: Final = msgspec.json.Decoder(Event)


@dataclass(slots=True)
class Sample:
    """One request, measured. Times are seconds of one clock.

    due_s: when it was to be sent. event_s: when each token event was read; for an answer that is not streamed, its end.
    """

    due_s: float
    sent_s: float
    end_s: float
    num_in: int
    num_out: int
    event_s: list[float] = field(default_factory=list)
    num_reads: int = 0

    @property
    def ttft_s(self) -> float:
        """From when it was due to its first token."""
        return self.event_s[0] - self.due_s

    @property
    def latency_s(self) -> float:
        """From when it was due to the end of the answer."""
        return self.end_s - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        """Between one token event and the next."""
        return [later - earlier for earlier, later in zip(self.event_s, self.event_s[1:], strict=False)]

    @property
    def s_per_token(self) -> float:
        """Mean time of a token after the first; 0 where there is but one."""
        return (self.event_s[-1] - self.event_s[0]) / max(1, self.num_out - 1)


def parse(answer: Answer, due_s: float, *, stream: bool) -> Sample:
    """The sample of one answer. Raises AnswerError where it is none: another status, an error, no tokens."""
    if answer.status != 200:
        raise AnswerError(f"status {answer.status}: {answer.body[:300].decode(errors='replace')}")
    events = _events(answer) if stream else [(answer.reads[-1][0], answer.body)]
    usage, event_s, read_s = None, [], set()
    for now, data in events:
        try:
            event = DECODER.decode(data)
        except msgspec.DecodeError as error:
            raise AnswerError(f"not an event of completions ({error}): {data[:200]!r}") from None
        if event.error is not None:
            raise AnswerError(f"an error in the stream: {event.error}")
        usage = event.usage or usage
        if event.choices and (event.choices[0].text or event.choices[0].finish_reason is None or not stream):
            event_s.append(now)
            read_s.add(now)
    if not event_s and usage and usage.completion_tokens:  # all in the event that ends it, and without text
        event_s, read_s = [answer.reads[-1][0]], {answer.reads[-1][0]}
    if not event_s:
        raise AnswerError("no tokens")
    num_in, num_out = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, len(event_s))
    return Sample(due_s, answer.sent_s, answer.reads[-1][0], num_in, num_out, event_s, len(read_s))


def _events(answer: Answer) -> list[tuple[float, bytes]]:
    """The data lines of a stream, each with the time of the read that completed it. All events have one data line."""
    events, rest = [], b""
    for now, data in answer.reads:
        *lines, rest = (rest + data).split(b"\n")
        events += [(now, line[5:].strip()) for line in lines if line.startswith(b"data:")]
    if rest.startswith(b"data:"):
        events.append((answer.reads[-1][0], rest[5:].strip()))
    return [(now, data) for now, data in events if data != b"[DONE]"]

"""Reading: how the answers of one request are read, which is the same for every API that spells what was read.

a request's tools, the model's format, the prompt's end --> Reading --> a parser for each choice --> events
"""

import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from aserve.core.answer_events import AnswerParser
from aserve.core.errors import InvalidRequestError
from aserve.core.params import SamplingParams
from aserve.core.structured import CallRules, StructuredOutputs, ThoughtRules
from aserve.engine import Engine
from aserve.http.tool_use import ToolUse

_ALPHANUMERIC: Final = string.ascii_letters + string.digits


def call_id() -> str:
    """A new one, as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """One that Mistral's templates take: nine letters or digits."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a request's answers are read. new_parser: None where they are content and nothing else.

    markers: texts that have to reach the parser. calls: what can be enforced of calls, where there may be any.
    thoughts: what may come before another structure. new_id: names a call.
    is_single: calls after the first are left out. is_named: the call was asked for by its name, which is no reason for
    an answer to end.
    """

    new_parser: Callable[[], AnswerParser] | None = None
    markers: frozenset[str] = frozenset()
    calls: CallRules | None = None
    has_thoughts: bool = False
    thoughts: ThoughtRules | None = None
    new_id: Callable[[], str] = call_id
    is_single: bool = False
    is_named: bool = False

    def parser(self) -> AnswerParser:
        """Of one more choice."""
        assert self.new_parser is not None, "there is nothing to read"
        return self.new_parser()


CONTENT: Final = Reading()
"""All that there is."""


def reading_of(
    engine: Engine, use: ToolUse | None, prompt: Sequence[int], *, new_id: Callable[[], str] = call_id
) -> Reading:
    """How answers to a prompt are read. use: the tools that they may call. new_id: names a call."""
    info, texts = engine.info, engine.texts
    is_bare = use is not None and use.is_required and info.call_format is None
    format = texts.format(with_calls=use is not None, is_bare=is_bare)
    if format is None:
        return CONTENT
    calls = None
    if use is not None and (is_bare or info.call_format is not None):
        call_format = None if is_bare else info.call_format
        calls = use.rules(call_format, info.thought_format, in_thought=texts.begins_thought(prompt))
    return Reading(
        new_parser=texts.parsers(format, {} if use is None else use.schemas, prompt),
        markers=frozenset(filter(None, format.markers())),
        calls=calls,
        has_thoughts=format.thoughts is not None or format.channels is not None,
        thoughts=texts.thoughts_before(prompt),
        new_id=short_call_id if info.call_format == "mistral" else new_id,
        is_single=use is not None and use.is_single,
        is_named=use is not None and use.is_named,
    )


def enforced(
    params: SamplingParams, use: ToolUse | None, reading: Reading, *, is_of_all: bool = False
) -> SamplingParams:
    """With what is enforced of calls, and of what follows thoughts.

    A structure that is asked for is one of text: where a call has to be made there is none, and where one may be made
    an answer is calls, or has the structure. is_of_all: it is one of all answers, none of which is a call then. Raises
    `InvalidRequestError` where one has to be.
    """
    structured, calls = params.structured, reading.calls
    if structured is None:
        if use is None or calls is None or not use.is_enforced:
            return params
        return msgspec.structs.replace(params, structured=StructuredOutputs(calls=calls))
    if use is not None and use.is_required and is_of_all:
        raise InvalidRequestError("tool_choice asks for a call, and structured_outputs for no call", "tool_choice")
    if use is not None and use.is_required:
        structured = StructuredOutputs(calls=calls)
    else:
        calls = None if is_of_all else calls
        structured = msgspec.structs.replace(structured, calls=calls, thoughts=reading.thoughts)
    return msgspec.structs.replace(params, structured=structured)

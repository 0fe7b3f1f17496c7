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
from aserve.core.structured import StructuredOutputs
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

    markers: texts that have to reach the parser. structure: what is enforced of calls. new_id: names a call.
    is_single: calls after the first are left out. is_named: the call was asked for by its name, which is no reason for
    an answer to end.
    """

    new_parser: Callable[[], AnswerParser] | None = None
    markers: frozenset[str] = frozenset()
    structure: StructuredOutputs | None = None
    has_thoughts: bool = False
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
    is_bare = use is not None and use.is_required and not texts.can_enforce_calls
    format = texts.format(with_calls=use is not None, is_bare=is_bare)
    if format is None:
        return CONTENT
    structure = None
    if use is not None and use.is_enforced:
        call_format = None if is_bare else info.call_format
        in_thought = texts.begins_thought(format, prompt)
        structure = use.structure(call_format, info.thought_format, in_thought=in_thought)
    return Reading(
        new_parser=texts.parsers(format, {} if use is None else use.schemas, prompt),
        markers=frozenset(filter(None, format.markers())),
        structure=structure,
        has_thoughts=format.thoughts is not None or format.channels is not None,
        new_id=short_call_id if info.call_format == "mistral" else new_id,
        is_single=use is not None and use.is_single,
        is_named=use is not None and use.is_named,
    )


def enforced(params: SamplingParams, use: ToolUse | None, reading: Reading) -> SamplingParams:
    """With what is enforced of calls. Raises `InvalidRequestError` where another structure is asked for as well.

    Where a call may be made, and need not be, another structure is that of all answers: none is a call.
    """
    if reading.structure is None or (params.structured is not None and use is not None and not use.is_required):
        return params
    if params.structured is not None:
        raise InvalidRequestError("tool_choice asks for a call, and another field for another structure", "tool_choice")
    return msgspec.structs.replace(params, structured=reading.structure)

"""A model in this process."""

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec

from aserve.cli.asking.source import Asked, Ended, Piece
from aserve.core.answer_events import AnswerEvent, Content, Reasoning
from aserve.core.params import SamplingParams
from aserve.core.structured import StructuredOutputs
from aserve.engine import Engine
from aserve.http.reading import CONTENT, enforced, reading_of


class Local:
    """An engine that has been entered, which is closed with it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.name = engine.info.names[0]

    async def ask(self, asked: Asked) -> AsyncGenerator[Piece | Ended]:
        """As a `Source`; thoughts are told from the rest by the model's own format, in a chat."""
        engine, reading = self._engine, CONTENT
        prompt: str | tuple[int, ...] = asked.prompt
        if asked.messages is not None:
            prompt = await engine.encode_chat(asked.messages, must_fit=True)
            reading = reading_of(engine, None, prompt)
        params = enforced(_params(engine, asked.fields, asked.schema), None, reading)
        parser = None if reading is CONTENT else reading.parser()
        num_tokens, reason = 0, None
        is_chat = asked.messages is not None
        async with engine.open(prompt, params, starts_text=is_chat, markers=reading.markers) as mailbox:
            async for delta in mailbox:
                num_tokens += len(delta.token_ids)
                reason = delta.finish_reason
                events: list[AnswerEvent] = [Content(delta.text)] if parser is None else parser.feed(delta.text)
                if parser is not None and reason is not None:
                    events += parser.finish()
                for event in events:
                    if isinstance(event, Content | Reasoning) and event.text:
                        yield Piece(event.text, is_thought=isinstance(event, Reasoning))
            yield Ended(len(mailbox.prompt_token_ids), num_tokens, reason)

    async def aclose(self) -> None:
        """Close the engine."""
        await self._engine.aclose()


def _params(engine: Engine, fields: Mapping[str, Any], schema: Mapping[str, Any] | None) -> SamplingParams:
    params = engine.default_params(**fields)
    return params if schema is None else msgspec.structs.replace(params, structured=StructuredOutputs(json=schema))

"""A request's prompts as token ids: encoded, and cut where the request asks for it."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from aserve.core.params import SamplingParams
from aserve.engine import Engine
from aserve.http.endpoint import Exchange
from aserve.http.openai.schema import GenerationFields
from aserve.http.shapes import UnknownFieldError
from aserve.http.tally import TokenIds


def check_room(engine: Engine, fields: GenerationFields, exchange: Exchange) -> None:
    """Refuse now what would be refused in the end: before a prompt is rendered and tokenized."""
    engine.check_room(
        tenant=exchange.tenant, priority=exchange.priority_of(fields.priority), timeout_s=fields.timeout_s
    )


def check_variables(engine: Engine, raw: Mapping[str, Any], *, with_tools: bool) -> None:
    """Raise `UnknownFieldError` for the first of chat_template_kwargs that the chat template does not read."""
    variables = raw.get("chat_template_kwargs")
    if not variables:
        return
    for name, complaint in engine.texts.unread_variables(variables, with_tools=with_tools).items():
        raise UnknownFieldError(complaint, "chat_template_kwargs", variables, name)


async def text_prompt(engine: Engine, fields: GenerationFields, prompt: str | TokenIds) -> TokenIds:
    """One prompt of a completion."""
    if isinstance(prompt, str):
        await asyncio.sleep(0)  # a thousand short prompts, each encoded at once, must not hold the loop
        return await engine.encode(
            prompt,
            add_special_tokens=fields.add_special_tokens is not False,
            must_fit=fields.truncate_prompt_tokens is None,
        )
    return prompt


def check_lengths(engine: Engine, fields: GenerationFields, prompts: Sequence[str | TokenIds]) -> None:
    """Raise `ContextLengthError` where one of them cannot fit, before any is worked on."""
    if fields.truncate_prompt_tokens is None:
        for prompt in prompts:
            engine.texts.check_length(prompt)


def truncated(engine: Engine, fields: GenerationFields, params: SamplingParams, prompt: TokenIds) -> TokenIds:
    """The last tokens of a prompt (or the first, if truncation_side says right), as many as truncate_prompt_tokens.

    -1 keeps as many as leave room for max_tokens, or for one token.
    """
    limit = fields.truncate_prompt_tokens
    if limit is None:
        return prompt
    if limit == -1:
        limit = max(engine.info.max_model_len - (params.max_tokens or 1), 1)
    return prompt[:limit] if fields.truncation_side == "right" else prompt[max(len(prompt) - limit, 0) :]

"""A glance at a large body: what its fields' lengths and first characters tell is refused before they are decoded."""

from collections.abc import Mapping

from aserve.core.errors import InvalidRequestError
from aserve.engine import Engine
from aserve.http.body import Glance, is_flat
from aserve.http.openai.completions import PROMPT_SHAPES


def generation_glance(engine: Engine) -> Glance:
    """For routes that answer: a prompt that cannot fit, unless it is to be truncated, and messages that are none."""

    def glance(members: Mapping[str, bytes]) -> None:
        _check_messages(members.get("messages", b""))
        if "truncate_prompt_tokens" in members:
            return
        prompt = members.get("prompt", b"")
        if prompt.startswith(b'"'):
            engine.texts.check_json(prompt, must_fit=True)
        elif is_flat(prompt):
            engine.texts.check_num_ids(prompt.count(b",") + 1)
        elif prompt.startswith(b"[["):
            if b'"' in prompt:
                raise InvalidRequestError(PROMPT_SHAPES, "prompt")
            engine.texts.check_batch(prompt.count(b","))

    return glance


def input_glance(engine: Engine) -> Glance:
    """For responses: an input that is a text and cannot fit."""

    def glance(members: Mapping[str, bytes]) -> None:
        given = members.get("input", b"")
        if is_flat(given):
            raise InvalidRequestError("input must be a text, or a list of items, which are objects", "input")
        if given.startswith(b'"'):
            try:
                engine.texts.check_json(given, must_fit=True)
            except InvalidRequestError as error:
                error.param = "input"
                raise

    return glance


def text_glance(engine: Engine) -> Glance:
    """For routes that turn text into tokens or back: too many tokens, and what is no text and no message."""

    def glance(members: Mapping[str, bytes]) -> None:
        _check_messages(members.get("messages", b""))
        prompt = members.get("prompt", b"")
        if prompt.startswith(b"["):
            raise InvalidRequestError("prompt: expected str, got array", "prompt")
        engine.texts.check_json(prompt, must_fit=False)
        tokens = members.get("tokens", b"")
        if is_flat(tokens):
            engine.texts.check_num_decoded(range(tokens.count(b",") + 1))

    return glance


def _check_messages(messages: bytes) -> None:
    if messages.startswith(b'"') or is_flat(messages):
        raise InvalidRequestError("messages must be a list of messages, which are objects", "messages")

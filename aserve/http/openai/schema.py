"""The shapes of requests: which fields work, of which type, and the errors that say so.

Types are strict JSON types: true is no number, "1" is none either, and 1.0 is no integer. Values that are out of bounds
are found by `SamplingParams` and the engine, which say so with the field's name.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from aserve.core.config import ModelInfo
from aserve.core.errors import InvalidRequestError, ModelNotFoundError
from aserve.core.params import SamplingParams
from aserve.engine import AsyncEngine
from aserve.http.errors import echo
from aserve.http.openai.fields import check_names

MAX_PROMPTS: Final = 1024
_PROMPT_KINDS: Final[Mapping[type, Any]] = {str: list[str], list: list[list[int]]}
_PROMPT_SHAPES: Final = "prompt must be a string, a list of token ids, or a list of either, and not empty"
DEFAULT_COMPLETION_TOKENS: Final = 16

ModelName = Annotated[str, Meta(max_length=256)]
PositiveInt = Annotated[int, Meta(ge=1)]


class StreamOptions(msgspec.Struct, frozen=True):
    """stream_options. include_usage: a last chunk with the token counts."""

    include_usage: bool | None = None


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and text completions share. None is "as the model's generation_config.json says, or the default"."""

    model: ModelName | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage is True


class Message(msgspec.Struct, frozen=True):
    """One message, as far as it is checked here; the chat template sees the object that was sent."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


MESSAGE_FIELDS: Final = Message.__struct_fields__


class ChatFields(GenerationFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]


class CompletionFields(GenerationFields, frozen=True, kw_only=True):
    """POST /v1/completions. prompt: see `prompts_of`."""

    prompt: Any


class TokenizeFields(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: a prompt, or messages. add_special_tokens: of a prompt only, as in /v1/completions."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: ModelName | None = None
    tokens: list[int]


Fields = TypeVar("Fields", bound=msgspec.Struct)


def parse(raw: Mapping[str, Any], kind: type[Fields]) -> Fields:
    """The fields of a request. Raises `InvalidRequestError` naming the one that is wrong, unknown or not supported."""
    try:
        fields = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _translated(error) from None
    check_names(raw, kind.__struct_fields__)
    for index, message in enumerate(raw.get("messages") or ()):
        check_names(message, MESSAGE_FIELDS, f"messages[{index}].")
    if (options := raw.get("stream_options")) is not None:
        if raw.get("stream") is not True:
            raise InvalidRequestError("stream_options is for streams: set stream to true", "stream_options")
        check_names(options, StreamOptions.__struct_fields__, "stream_options.")
    return fields


def check_model(info: ModelInfo, model: str | None) -> str:
    """The name to answer with. Raises `ModelNotFoundError` for one that is not served."""
    if model is None:
        return info.names[0]
    if model not in info.names:
        raise ModelNotFoundError(f"the model {echo(model)} is not served here; {echo(info.names[0])} is")
    return model


def sampling_params(
    engine: AsyncEngine, fields: GenerationFields, default_max_tokens: int | None = None
) -> SamplingParams:
    """How to sample: what the request says, else the model's defaults. Raises `InvalidRequestError` out of bounds.

    default_max_tokens: where the request sets no cap; None is all the room there is.
    """
    caps = (fields.max_completion_tokens, fields.max_tokens, default_max_tokens)
    stop = (fields.stop,) if isinstance(fields.stop, str) else fields.stop
    return engine.default_params(
        max_tokens=next((cap for cap in caps if cap is not None), None),
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        min_p=fields.min_p,
        seed=fields.seed,
        stop=None if stop is None else tuple(stop),
        stop_token_ids=None if fields.stop_token_ids is None else tuple(fields.stop_token_ids),
        ignore_eos=fields.ignore_eos,
        min_tokens=fields.min_tokens,
    )


def prompts_of(prompt: Any) -> Sequence[str | list[int]]:
    """The prompts of a completion request: a text, a list of texts, a list of token ids, or a list of such lists."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequestError(_PROMPT_SHAPES, "prompt")
    kind = _PROMPT_KINDS.get(type(prompt[0]))
    if kind is not None and len(prompt) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt takes at most {MAX_PROMPTS} prompts, got {len(prompt)}", "prompt")
    try:
        return msgspec.convert(prompt, kind) if kind else [msgspec.convert(prompt, list[int])]
    except msgspec.ValidationError:
        raise InvalidRequestError(_PROMPT_SHAPES, "prompt") from None


_MISSING: Final = re.compile(r"Object missing required field `(?P<field>\w+)`")


def _translated(error: msgspec.ValidationError) -> InvalidRequestError:
    """msgspec's "Expected `int`, got `str` - at `$.top_k`" as "top_k: expected int, got str", param "top_k"."""
    problem, found, path = str(error).rpartition(" - at `$")
    problem, path = (problem, path.strip("`.")) if found else (path, "")
    if missing := _MISSING.fullmatch(problem):
        path = f"{path}.{missing['field']}".lstrip(".")
        problem = "this field is required"
    param = re.split(r"[.\[]", path)[0] or None
    problem = problem[:1].lower() + problem[1:].replace("`", "")
    return InvalidRequestError(f"{path}: {problem}" if path else problem, param)

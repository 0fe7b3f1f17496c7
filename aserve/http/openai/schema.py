"""What the shapes of requests have in common: which fields work, of which type, and the errors that say so.

A route's own shape is beside the route (`ChatFields` in chat.py), and is taken from the request by `parse`.

Types are strict JSON types: true is no number, "1" is none either, and 1.0 is no integer. Values that are out of bounds
are found by `SamplingParams` and the engine, which say so with the field's name.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from aserve.core.errors import InvalidRequestError
from aserve.core.params import MAX_CHOICES, BeamParams, SamplingParams
from aserve.core.request import CACHE_SALT, REQUEST_ID
from aserve.engine import Engine
from aserve.http.explaining import XAserve, check_extension
from aserve.http.openai.fields import check_names
from aserve.http.openai.logprobs import check_logprobs
from aserve.http.openai.structured import ResponseFormat, StructuredFields, check_structure_names, structure_of
from aserve.http.openai.tools import ToolCalls, check_tool_names
from aserve.http.shapes import MAX_MESSAGES, Fields, ModelName, PositiveInt, converted


class StreamOptions(msgspec.Struct, frozen=True):
    """stream_options. include_usage: a last chunk with the token counts. continuous_usage_stats: all have them."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and text completions and responses share. None is "as generation_config.json says, or the default"."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128, pattern=CACHE_SALT.pattern)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    request_id: Annotated[str, Meta(pattern=REQUEST_ID.pattern)] | None = None
    timeout_s: float | None = None
    structured_outputs: StructuredFields | None = None
    stream: bool | None = None
    x_aserve: XAserve | None = None


class GenerationFields(SamplingFields, frozen=True, kw_only=True):
    """What chat and text completions share beyond it."""

    model: ModelName | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    thinking_token_budget: int | None = None
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream has the token counts so far; where it does not end with them, none has."""
        options = self.stream_options
        return self.include_usage and options is not None and options.continuous_usage_stats is True

    @property
    def structures(self) -> dict[str, Any]:
        """What may ask for a structure of the answer, by name."""
        return {"structured_outputs": self.structured_outputs, "response_format": self.response_format}

    @property
    def shows_special_tokens(self) -> bool:
        """Whether special tokens are part of the text."""
        return self.skip_special_tokens is False


_DECIDED: Final = frozenset({"max_tokens", "best_of", "prompt_logprobs"})
_AS_GIVEN: Final = tuple(
    name
    for name in GenerationFields.__struct_fields__
    if name in SamplingParams.__struct_fields__ and name not in _DECIDED
)
"""Fields that `SamplingParams` has under the same name, and takes as they are."""


class Message(msgspec.Struct, frozen=True):
    """One message, as far as it is checked here; the chat template sees the object that was sent."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: ToolCalls | None = None


MESSAGE_FIELDS: Final = frozenset(Message.__struct_fields__)
ADDED: Final = ("parsed", "parsed_arguments", "provider_specific_fields")
"""By a client's library to what it was answered, and sent back. OpenAI's SDKs: `parsed`, made of a text, and
`parsed_arguments` of calls. litellm: `provider_specific_fields`."""
Messages = Annotated[list[Message], Meta(max_length=MAX_MESSAGES)]


def parse(raw: dict[str, Any], kind: type[Fields]) -> Fields:
    """The fields of a request. Raises `InvalidRequestError` naming the one that is wrong, unknown or not supported."""
    check_names(raw, kind.__struct_fields__)
    fields = converted(raw, kind)
    for index, message in enumerate(raw.get("messages") or ()):
        _leave_out_added(message)
        check_names(message, MESSAGE_FIELDS, f"messages[{index}].")
    if (options := raw.get("stream_options")) is not None:
        if raw.get("stream") is not True:
            raise InvalidRequestError("stream_options is for streams: set stream to true", "stream_options")
        check_names(options, StreamOptions.__struct_fields__, "stream_options.")
    check_extension(raw, getattr(fields, "x_aserve", None))
    check_structure_names(raw)
    check_tool_names(raw)
    return fields


def _leave_out_added(message: dict[str, Any]) -> None:
    """Take what is ADDED from a message: templates must not see it."""
    for name in ADDED:
        message.pop(name, None)
        for call in message.get("tool_calls") or ():
            call.pop(name, None)
            call["function"].pop(name, None)


def sampling_params(
    engine: Engine,
    fields: GenerationFields,
    *,
    max_tokens: int | None,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
) -> SamplingParams:
    """How to sample: what the request says, else the model's defaults. Raises `InvalidRequestError` out of bounds.

    max_tokens: the cap that was decided on; None is all the room there is.
    """
    if fields.stream and fields.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs is not for streams", "prompt_logprobs")
    if fields.logprob_token_ids:
        if num_logprobs is None:
            raise InvalidRequestError("logprob_token_ids needs logprobs", "logprob_token_ids")
        num_logprobs = None  # as many as are named
    check_logprobs(engine, fields)
    beam = _beam_params(fields)
    given = {name: getattr(fields, name) for name in _AS_GIVEN}
    return engine.default_params(
        **given,
        max_tokens=max_tokens,
        best_of=fields.best_of if beam is None else None,
        beam=beam,
        logprobs=num_logprobs,
        prompt_logprobs=num_prompt_logprobs,
        structured=structure_of(fields.response_format, fields.structured_outputs),
    )


def _beam_params(fields: GenerationFields) -> BeamParams | None:
    """best_of, or else n, is the width: as many hypotheses are kept, and n are returned."""
    if not fields.use_beam_search:
        for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(fields, name) not in (None, neutral):
                raise InvalidRequestError(f"{name} is for beam search: set use_beam_search to true", name)
        return None
    if fields.best_of is not None and not 1 <= fields.best_of <= MAX_CHOICES:
        raise InvalidRequestError(f"best_of must be in [1, {MAX_CHOICES}], got {fields.best_of}", "best_of")
    n = 1 if fields.n is None else fields.n
    return BeamParams(
        width=fields.best_of or min(max(n, 1), MAX_CHOICES),  # an n out of bounds is refused under its own name
        length_penalty=1.0 if fields.length_penalty is None else fields.length_penalty,
        early_stopping=fields.early_stopping or False,
    )

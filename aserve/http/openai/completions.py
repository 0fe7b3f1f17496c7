"""POST /v1/completions."""

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from aserve.core.errors import InvalidRequestError
from aserve.core.outputs import Completion, TextDelta
from aserve.core.params import SamplingParams
from aserve.core.plan import TokenScores
from aserve.engine import Engine
from aserve.http.endpoint import Exchange, Handler
from aserve.http.explaining import explained_of
from aserve.http.generation import Generation, Usage, answer
from aserve.http.openai.chunks import Chunks, usage_suffix
from aserve.http.openai.logprobs import CompletionLogprobs, Speller, prompt_logprobs
from aserve.http.openai.prompts import check_lengths, check_room, text_prompt, truncated
from aserve.http.openai.schema import GenerationFields, parse, sampling_params
from aserve.http.served import adapter_of, check_model
from aserve.http.shapes import told_as_asked
from aserve.http.sse import StreamLimits
from aserve.http.tally import TokenIds

_encode: Final = msgspec.json.encode
MAX_PROMPTS: Final = 1024
MAX_SEQUENCES: Final = 8192
"""Of all prompts of a request together: they are queued at one stroke, and nobody else is served meanwhile."""
_PROMPT_KINDS: Final[Mapping[type, Any]] = {str: list[str], list: list[TokenIds]}
PROMPT_SHAPES: Final = "prompt must be a string, a list of token ids, or a list of either, and not empty"
DEFAULT_COMPLETION_TOKENS: Final = 16


class CompletionFields(GenerationFields, frozen=True, kw_only=True):
    """POST /v1/completions. prompt: see `prompts_of`. max_tokens may be 0 with echo: the prompt is scored."""

    prompt: Any
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    logprobs: int | None = None

    @property
    def scores_only(self) -> bool:
        """Whether nothing is to be generated. Raises `InvalidRequestError` where nothing is to be shown, either."""
        if self.max_tokens != 0 or self.max_completion_tokens is not None:
            return False
        if not self.echo:
            raise InvalidRequestError("max_tokens may be 0 only with echo", "max_tokens")
        if self.logprob_token_ids:
            raise InvalidRequestError("logprob_token_ids is of generated tokens: raise max_tokens", "logprob_token_ids")
        return True


def completions(engine: Engine, limits: StreamLimits) -> Handler:
    """The handler of this route."""

    async def handle(exchange: Exchange) -> None:
        fields = await exchange.work(parse, exchange.fields, CompletionFields)
        with told_as_asked(fields.structures):
            await _answer(engine, limits, exchange, fields)

    return handle


async def _answer(engine: Engine, limits: StreamLimits, exchange: Exchange, fields: CompletionFields) -> None:
    model = check_model(engine, fields.model)
    check_room(engine, fields, exchange)
    caps = (fields.max_completion_tokens, 1 if fields.scores_only else fields.max_tokens, DEFAULT_COMPLETION_TOKENS)
    params = sampling_params(
        engine,
        fields,
        max_tokens=next(cap for cap in caps if cap is not None),
        num_logprobs=fields.logprobs,
        num_prompt_logprobs=fields.logprobs if fields.echo else fields.prompt_logprobs,
    )
    given = await exchange.work(prompts_of, fields.prompt)
    check_num_sequences(len(given), params)
    await exchange.work(check_lengths, engine, fields, given)
    whole = [await text_prompt(engine, fields, prompt) for prompt in given]
    prompts = [truncated(engine, fields, params, prompt) for prompt in whole]
    texts = None
    if fields.echo:
        texts = [
            text if isinstance(text, str) and len(prompt) == len(all_ids) else await engine.decode(prompt)
            for text, prompt, all_ids in zip(given, prompts, whole, strict=True)
        ]
    generation = Generation(
        prompts=prompts,
        params=params,
        stream=bool(fields.stream),
        include_usage=fields.include_usage,
        continuous_usage=fields.continuous_usage,
        cache_salt=fields.cache_salt or "",
        priority=exchange.priority_of(fields.priority),
        tenant=exchange.tenant,
        lora=adapter_of(engine, model),
        timeout_s=fields.timeout_s,
        scores_only=fields.scores_only,
        name=exchange.request_id,
        explained=explained_of(engine, exchange, fields.x_aserve),
    )
    wire = TextWire(engine, f"cmpl-{exchange.request_id}", model, fields, num_choices=params.n, echoed=texts)
    await answer(engine, generation, wire, exchange, limits)


def prompts_of(prompt: Any) -> Sequence[str | TokenIds]:
    """The prompts of a completion request: a text, a list of texts, a list of token ids, or a list of such lists."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequestError(PROMPT_SHAPES, "prompt")
    kind = _PROMPT_KINDS.get(type(prompt[0]))
    if kind is not None and len(prompt) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt takes at most {MAX_PROMPTS} prompts, got {len(prompt)}", "prompt")
    try:
        return msgspec.convert(prompt, kind) if kind else [msgspec.convert(prompt, TokenIds)]
    except msgspec.ValidationError:
        raise InvalidRequestError(PROMPT_SHAPES, "prompt") from None


def check_num_sequences(num_prompts: int, params: SamplingParams) -> None:
    """Raise `InvalidRequestError` where every prompt may be answered alone, but not so many with so many choices."""
    num_each = params.num_sequences if params.beam is None else params.beam.width
    if num_prompts * num_each > MAX_SEQUENCES:
        raise InvalidRequestError(
            f"prompts times choices must be at most {MAX_SEQUENCES}, got {num_prompts} times {num_each}", "n"
        )


class TextWire(Chunks):
    """Chunks and bodies of text completions. What never changes is encoded once.

    num_choices: of each prompt. echoed: the text of each prompt, where it is to come before the answer.
    """

    def __init__(
        self,
        engine: Engine,
        completion_id: str,
        model: str,
        fields: CompletionFields,
        *,
        num_choices: int,
        echoed: Sequence[str] | None,
    ) -> None:
        self._with_token_ids = bool(fields.return_token_ids)
        self._with_logprobs = fields.logprobs is not None
        self._with_prompt_logprobs = fields.prompt_logprobs is not None
        self._num_choices = num_choices
        self._echoed = echoed
        self._speller = Speller(
            engine,
            as_ids=bool(fields.return_tokens_as_token_ids),
            skip_special_tokens=not fields.shows_special_tokens,
        )
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._common = {"id": completion_id, "object": "text_completion", "created": int(time.time()), "model": model}
        super().__init__(b"data: " + _encode(self._common)[:-1])
        self._choice_head = self._head + b',"choices":[{"index":'

    def opening(
        self, index: int, prompt_token_ids: TokenIds, prompt_scores: Sequence[TokenScores], usage: Usage | None
    ) -> bytes:
        """Nothing, or the chunk with the prompt: its text, its log-probabilities, its token ids."""
        if not self._with_token_ids and self._echoed is None:
            return b""
        choice: dict[str, Any] = {
            "index": index,
            "text": self._prefix(index),
            "logprobs": self._prompt_part(index, prompt_token_ids, prompt_scores),
            "finish_reason": None,
        }
        if self._with_token_ids:
            choice |= {"prompt_token_ids": prompt_token_ids, "token_ids": []}
        return self._head + b',"choices":[' + _encode(choice) + b"]" + usage_suffix(usage) + b"}\n\n"

    def delta(self, delta: TextDelta, usage: Usage | None) -> bytes:
        """A chunk with text; with the reasons if it is the last."""
        says_nothing = not (delta.text or self._with_token_ids or (self._with_logprobs and delta.scores))
        if delta.finish_reason is None:
            if says_nothing:
                return b""
            reasons = b',"finish_reason":null'
        else:
            reasons = b',"finish_reason":"%b","stop_reason":%b' % (
                delta.finish_reason.encode(),
                _encode(delta.stop_reason),
            )
        logprobs = b',"logprobs":null'
        if self._with_logprobs:
            logprobs = b',"logprobs":' + _encode(self._part(delta.index, delta.token_ids, delta.scores))
        token_ids = b',"token_ids":' + _encode(delta.token_ids) if self._with_token_ids else b""
        start = b'%d,"text":' % delta.index
        end = b"}]" + usage_suffix(usage) + b"}\n\n"
        return b"".join((self._choice_head, start, _encode(delta.text), logprobs, reasons, token_ids, end))

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """Around the text."""
        if self._with_token_ids or self._with_logprobs:
            return None
        return self._choice_head + b'%d,"text":' % index, b',"logprobs":null,"finish_reason":null}]}\n\n'

    def whole(self, completions: Sequence[Completion], usage: Usage) -> dict[str, Any]:
        """The text_completion object."""
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        return {**self._common, "choices": choices, "usage": usage}

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        logprobs = self._prompt_part(index, completion.prompt_token_ids, completion.prompt_scores)
        if self._with_logprobs:
            part = self._part(index, completion.token_ids, completion.scores)
            logprobs = part if logprobs is None else {name: logprobs[name] + part[name] for name in part}
        scored = prompt_logprobs(self._speller, completion.prompt_scores) if self._with_prompt_logprobs else None
        return {
            "index": index,
            "text": self._prefix(index) + completion.text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "prompt_logprobs": scored,
            "prompt_token_ids": completion.prompt_token_ids if self._with_token_ids else None,
            "token_ids": completion.token_ids if self._with_token_ids else None,
        }

    def _prefix(self, index: int) -> str:
        return "" if self._echoed is None else self._echoed[index // self._num_choices]

    def _prompt_part(self, index: int, token_ids: TokenIds, scores: Sequence[TokenScores]) -> dict[str, Any] | None:
        """The prompt's "logprobs", where it is echoed; nothing predicts its first token."""
        if self._echoed is None or not self._with_logprobs:
            return None
        return self._spelled(index).prompt(token_ids, (None, *scores), self._prefix(index))

    def _part(self, index: int, token_ids: TokenIds, scores: Sequence[TokenScores]) -> dict[str, Any]:
        return self._spelled(index).part(token_ids, scores)

    def _spelled(self, index: int) -> CompletionLogprobs:
        return self._logprobs.setdefault(index, CompletionLogprobs(self._speller))

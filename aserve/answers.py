"""Answers: the ways to ask that are made of an engine's `open`, growing or whole, of a text or of a conversation.

Knows neither a model nor a scheduler, and nothing of how an engine comes to be.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Unpack

from aserve.core.errors import InvalidRequestError
from aserve.core.explanation import Explanation
from aserve.core.outputs import Completion, TextDelta, Transcript
from aserve.core.params import BeamParams, SamplingParams
from aserve.core.request import RequestTerms
from aserve.core.rules import check, instance, optional
from aserve.mailbox import Keeper, Mailbox

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]

_BEAM: Final = instance(BeamParams)
_PARAMS: Final = optional(instance(SamplingParams))


class Answers(ABC):
    """What answers, given `open` and `encode_chat`.

    params: None is what the model's generation_config.json says. terms: request_id, cache_salt, priority, timeout_s,
    lora and explain, see `RequestTerms`. Every method raises as `open`.
    """

    @abstractmethod
    def open(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        starts_text: bool = False,
        **terms: Unpack[RequestTerms],
    ) -> AbstractAsyncContextManager[Mailbox]:
        """Submit a prompt; inside the block, read its mailbox."""

    @abstractmethod
    async def encode_chat(self, messages: Messages, *, must_fit: bool = False) -> tuple[int, ...]:
        """The prompt of a conversation. must_fit: refuse one that is too long, before it is tokenized."""

    @abstractmethod
    def explanation(self, request_id: str) -> Explanation | None:
        """Where the time of a request went that asked for it with `explain`: so far, or, of the last 256 that ended, in
        all. None of any other. Call it in the engine's event loop.
        """

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **terms: Unpack[RequestTerms]
    ) -> AsyncGenerator[TextDelta]:
        """`async for delta in engine.generate(...)`: the answer as it grows."""
        async with self.open(prompt, params, **terms) as mailbox:
            async for delta in mailbox:
                yield delta

    async def chat(
        self, messages: Messages, params: SamplingParams | None = None, **terms: Unpack[RequestTerms]
    ) -> AsyncGenerator[TextDelta]:
        """`generate` for a conversation: a list of {"role": ..., "content": ...}."""
        prompt = await self.encode_chat(messages, must_fit=True)
        async with self.open(prompt, params, starts_text=True, **terms) as mailbox:
            async for delta in mailbox:
                yield delta

    async def complete(
        self, prompt: Prompt, params: SamplingParams | None = None, **terms: Unpack[RequestTerms]
    ) -> Completion:
        """The whole answer at once, where there is one (n = 1)."""
        _check_single(params)
        (completion,) = await self.complete_n(prompt, params, **terms)
        return completion

    async def complete_chat(
        self, messages: Messages, params: SamplingParams | None = None, **terms: Unpack[RequestTerms]
    ) -> Completion:
        """`complete` for a conversation, as in `chat`."""
        _check_single(params)
        prompt = await self.encode_chat(messages, must_fit=True)
        (completion,) = await self.complete_n(prompt, params, starts_text=True, **terms)
        return completion

    async def complete_n(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        starts_text: bool = False,
        **terms: Unpack[RequestTerms],
    ) -> tuple[Completion, ...]:
        """All n choices at once, by index; ranked ones (best_of, beam search) are best first.

        starts_text: as in `open`; True for a conversation that was encoded by `encode_chat`.
        """
        choices: defaultdict[int, Transcript] = defaultdict(Transcript)
        keeper = Keeper(choices)
        async with self.open(prompt, params, starts_text=starts_text, **terms) as mailbox:
            mailbox.shortcut(keeper)
            async for delta in mailbox:
                keeper.take(delta)
            explanation = self.explanation(mailbox.request_id) if terms.get("explain") else None
        whole = mailbox.prompt_token_ids, choices[0].prompt_scores, explanation
        return tuple(choices[index].completion(*whole) for index in sorted(choices))

    async def beam_search(
        self,
        prompt: Prompt,
        beam: BeamParams,
        *,
        n: int | None = None,
        max_tokens: int | None = None,
        **terms: Unpack[RequestTerms],
    ) -> tuple[Completion, ...]:
        """The n best hypotheses (all of the width, unless given), best first, each with its cumulative_logprob.

        max_tokens: None is all the room there is. For stop tokens and other fields give `complete_n` a `beam`.
        """
        width = check("beam", _BEAM, beam).width
        params = SamplingParams(beam=beam, n=width if n is None else n, max_tokens=max_tokens)
        return await self.complete_n(prompt, params, **terms)


def _check_single(params: SamplingParams | None) -> None:
    """Raise `InvalidRequestError` for parameters that ask for several choices, where one is given."""
    checked = check("params", _PARAMS, params)
    if checked is not None and checked.n > 1:
        raise InvalidRequestError(f"n must be 1 where one choice is given, got {checked.n}: use complete_n", "n")

"""Vectors: the ways to ask a model that pools, which are made of an engine's `open_input`: embed, classify, score.

embed       text -> vector
classify    text -> a number for each label
score       two texts -> a number: their classifier's, or the cosine of their embeddings
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Unpack

from aserve.answers import Prompt
from aserve.core.config import EngineConfig, ModelInfo
from aserve.core.errors import InvalidRequestError
from aserve.core.outputs import TextDelta
from aserve.core.pooling import (
    InputTerms,
    Pooled,
    Pooling,
    PoolingParams,
    PoolingTask,
    TokenizedInput,
    activated,
    check_params,
    cosine,
)
from aserve.core.request import RequestTerms, SharedTerms
from aserve.core.rules import check, instance
from aserve.mailbox import Mailbox
from aserve.texts import Texts

_PARAMS: Final = instance(PoolingParams)
DEFAULT: Final = PoolingParams()


class PoolingTerms(RequestTerms, InputTerms, total=False):
    """Terms of one input, as keyword arguments: those of any request, and how it becomes tokens."""


class Vectors(ABC):
    """What pools, given `open_input`. Every method raises as that."""

    @abstractmethod
    def open_input(
        self, tokens: TokenizedInput, params: PoolingParams = DEFAULT, **terms: Unpack[RequestTerms]
    ) -> AbstractAsyncContextManager[Mailbox]:
        """Submit an input; its mailbox has one delta, with a vector."""

    @property
    @abstractmethod
    def info(self) -> ModelInfo:
        """The model that is served."""

    @property
    @abstractmethod
    def config(self) -> EngineConfig:
        """The numbers that were decided at loading."""

    @property
    @abstractmethod
    def texts(self) -> Texts:
        """What is done with texts."""

    @property
    def pooling(self) -> Pooling:
        """What the model makes of an input. Raises `InvalidRequestError` for one that generates text."""
        pooling = self.info.pooling
        if pooling is None:
            raise InvalidRequestError(
                "this model generates text and pools nothing: start aserve with --runner pooling"
                " (and --convert embed or classify)",
                "model",
            )
        return pooling

    def check_task(self, *tasks: PoolingTask) -> None:
        """Raise `InvalidRequestError` for a model that is served for other tasks."""
        own = self.pooling.task
        if own not in tasks:
            raise InvalidRequestError(
                f"this model was started to {own}: start aserve with --convert {tasks[0]} to {tasks[0]} by it", "model"
            )

    def check_pooling(self, params: PoolingParams) -> None:
        """Raise `InvalidRequestError` for what the model cannot give."""
        check_params(self.pooling, params)

    async def pool(
        self, tokens: TokenizedInput, params: PoolingParams = DEFAULT, **terms: Unpack[RequestTerms]
    ) -> Pooled:
        """What the model makes of one input, whatever it is for."""
        async with self.open_input(tokens, params, **terms) as mailbox:
            delta: TextDelta = await anext(mailbox)
        assert delta.vector is not None, "a runner that pools makes a vector of each input"
        return Pooled(
            prompt_token_ids=tokens.token_ids,
            values=activated(self.pooling, params, delta.vector),
            num_cached_tokens=delta.num_cached_tokens,
            timings=delta.timings,
        )

    async def pool_all(
        self, inputs: Sequence[TokenizedInput], params: PoolingParams = DEFAULT, **terms: Unpack[SharedTerms]
    ) -> list[Pooled]:
        """`pool` of several, in their order; no more at once than run at once. When one fails, all are ended."""
        found: dict[int, Pooled] = {}
        places = iter(range(len(inputs)))

        async def work() -> None:
            for place in places:
                found[place] = await self.pool(inputs[place], params, **terms)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(len(inputs), self.config.max_num_seqs)):
                    group.create_task(work(), name="aserve: inputs")
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0]  # noqa: B904  a group of one explains nothing
        return [found[place] for place in range(len(inputs))]

    async def embed(
        self,
        prompt: Prompt,
        *,
        dimensions: int | None = None,
        use_activation: bool | None = None,
        **terms: Unpack[PoolingTerms],
    ) -> Pooled:
        """The embedding of a text, or of token ids.

        dimensions: its first so many numbers, normalised anew, where the model's config allows it. use_activation:
        False leaves it unnormalised.
        """
        self.check_task("embed")
        params = PoolingParams(dimensions=dimensions, use_activation=use_activation)
        return await self._pool(prompt, params, terms)

    async def classify(
        self, prompt: Prompt, *, use_activation: bool | None = None, **terms: Unpack[PoolingTerms]
    ) -> Pooled:
        """A number for each label (`info.pooling.labels`): its probability, or its score without the activation."""
        self.check_task("classify", "reward")
        return await self._pool(prompt, PoolingParams(use_activation=use_activation), terms)

    async def score(
        self, query: str, document: str, *, use_activation: bool | None = None, **terms: Unpack[PoolingTerms]
    ) -> float:
        """How well a document answers a query.

        By a classifier with one label, which reads both; else the cosine of their embeddings.
        """
        params = PoolingParams(use_activation=use_activation)
        input_terms, request_terms = split_terms(terms)
        if self.pooling.task == "embed":
            tokens = await self.texts.encode_inputs([query, document], ["query", "document"], **input_terms)
            one, other = [await self.pool(each, params, **request_terms) for each in tokens]
            return cosine(one.values, other.values)
        self.check_scores_pairs()
        [pair] = await self.texts.encode_pairs([(query, document)], ["document"], **input_terms)
        return (await self.pool(pair, params, **request_terms)).values[0]

    def check_scores_pairs(self) -> None:
        """Raise `InvalidRequestError` for a classifier of several labels, of which none is the score."""
        if self.pooling.size != 1:
            raise InvalidRequestError(
                f"scores are made by a classifier with one label, and this one has {self.pooling.size}", "model"
            )

    async def _pool(self, prompt: Prompt, params: PoolingParams, terms: PoolingTerms) -> Pooled:
        input_terms, request_terms = split_terms(terms)
        [tokens] = await self.texts.encode_inputs([prompt], ["prompt"], **input_terms)
        return await self.pool(tokens, check("params", _PARAMS, params), **request_terms)


def split_terms(terms: PoolingTerms) -> tuple[InputTerms, RequestTerms]:
    """How an input becomes tokens, and the terms of its request."""
    names = InputTerms.__annotations__
    of_input = {name: value for name, value in terms.items() if name in names}
    of_request = {name: value for name, value in terms.items() if name not in names}
    return of_input, of_request  # type: ignore[return-value]  # each has the names of one of the two

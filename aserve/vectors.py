"""Vectors: the ways to ask a model that pools, which are made of an engine's `open_input`: embed, classify, score.

embed       text -> vector
classify    text -> a number for each label
score       two texts -> a number: their classifier's, or the cosine of their embeddings
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Unpack, cast

from aserve.answers import Prompt
from aserve.core.config import EngineConfig, ModelInfo
from aserve.core.errors import AserveError, InvalidRequestError, QueueTimeoutError
from aserve.core.outputs import DEADLINE, TextDelta
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
from aserve.core.rules import check, text
from aserve.edges import heard
from aserve.mailbox import Mailbox
from aserve.texts import Texts
from aserve.workers import Workers

DEFAULT: Final = PoolingParams()
LONG: Final = 16 * 1024
"""Numbers; what is made of more is made in a thread."""


class PoolingTerms(RequestTerms, InputTerms, total=False):
    """Terms of one input, as keyword arguments: those of any request, and how it becomes tokens."""


class SharedInputTerms(SharedTerms, InputTerms, total=False):
    """Terms that several inputs may have in common."""


class Vectors(ABC):
    """What pools, given `open_input`. Every method raises as that. workers: threads for what takes long."""

    workers: Workers

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
        """What the model makes of one input, whatever it is for.

        Raises `QueueTimeoutError` where its deadline comes first: half a vector is none.
        """
        async with self.open_input(tokens, params, **terms) as mailbox:
            delta: TextDelta = await anext(mailbox)
        if delta.vector is None:
            is_late = delta.stop_reason == DEADLINE
            told = "the request's deadline came" if is_late else "the request was aborted"
            raise (QueueTimeoutError if is_late else AserveError)(f"{told} before its vector was made")
        vector, pooling = delta.vector, self.pooling
        is_long = len(vector) > LONG
        values = (
            await self.workers.run(activated, pooling, params, vector)
            if is_long
            else activated(pooling, params, vector)
        )
        return Pooled(
            prompt_token_ids=tokens.token_ids,
            values=values,
            num_vectors=len(vector) // pooling.size,
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
                found[place] = await heard(self.pool(inputs[place], params, **terms))

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
        per_token: bool = False,
        **terms: Unpack[PoolingTerms],
    ) -> Pooled:
        """The embedding of a text, or of token ids.

        dimensions: its first so many numbers, normalised anew, where the model's config allows it. use_activation:
        False leaves it unnormalised. per_token: one of each token, in place of one of all.
        """
        params = PoolingParams(dimensions=dimensions, use_activation=use_activation, per_token=per_token)
        return await self._pool_prompt(prompt, params, terms, "embed")

    async def classify(
        self,
        prompt: Prompt,
        *,
        use_activation: bool | None = None,
        per_token: bool = False,
        **terms: Unpack[PoolingTerms],
    ) -> Pooled:
        """A number for each label (`info.pooling.labels`): its probability, or its score without the activation.

        per_token: of each token, where a decoder classifies.
        """
        params = PoolingParams(use_activation=use_activation, per_token=per_token)
        return await self._pool_prompt(prompt, params, terms, "classify", "reward")

    async def score(
        self, query: str, document: str, *, use_activation: bool | None = None, **terms: Unpack[SharedInputTerms]
    ) -> float:
        """How well a document answers a query.

        By a classifier with one label, which reads both; else the cosine of their embeddings.
        """
        params = PoolingParams(use_activation=use_activation)
        return (await self.score_pairs([(query, document)], params, **terms))[0]

    async def pool_prompts(
        self,
        prompts: Sequence[Prompt],
        params: PoolingParams,
        *tasks: PoolingTask,
        **terms: Unpack[SharedInputTerms],
    ) -> list[Pooled]:
        """What the model makes of several prompts, where it is for one of these tasks."""
        self.check_task(*tasks)
        of_input, of_request = _split(terms)
        names = [f"prompts[{index}]" for index in range(len(prompts))]
        return await self.pool_all(await self.texts.encode_inputs(prompts, names, **of_input), params, **of_request)

    async def score_pairs(
        self, pairs: Sequence[tuple[str, str]], params: PoolingParams = DEFAULT, **terms: Unpack[SharedInputTerms]
    ) -> list[float]:
        """`score` of several pairs. Where the model embeds, a text that comes twice is computed once."""
        of_input, of_request = _split(terms)
        pairs = [(check("query", text, query), check("document", text, document)) for query, document in pairs]
        if self.pooling.task == "embed":
            texts = list(dict.fromkeys(side for pair in pairs for side in pair))
            names = [f"texts[{index}]" for index in range(len(texts))]
            tokens = await self.texts.encode_inputs(texts, names, **of_input)
            found = dict(zip(texts, await self.pool_all(tokens, params, **of_request), strict=True))
            return [cosine(found[query].values, found[document].values) for query, document in pairs]
        self.check_scores_pairs()
        names = [f"documents[{index}]" for index in range(len(pairs))]
        tokens = await self.texts.encode_pairs(pairs, names, **of_input)
        return [output.values[0] for output in await self.pool_all(tokens, params, **of_request)]

    def check_scores_pairs(self) -> None:
        """Raise `InvalidRequestError` for a classifier of several labels, of which none is the score."""
        if self.pooling.size != 1:
            raise InvalidRequestError(
                f"scores are made by a classifier with one label, and this one has {self.pooling.size}", "model"
            )

    async def _pool_prompt(
        self, prompt: Prompt, params: PoolingParams, terms: PoolingTerms, *tasks: PoolingTask
    ) -> Pooled:
        self.check_task(*tasks)
        of_input, of_request = _split(terms)
        [tokens] = await self.texts.encode_inputs([prompt], ["prompt"], **of_input)
        return await self.pool(tokens, params, **of_request)


def _split(terms: Mapping[str, Any]) -> tuple[InputTerms, Any]:
    """How an input becomes tokens, and the terms of its request."""
    names = InputTerms.__annotations__
    of_input = {name: value for name, value in terms.items() if name in names}
    of_request = {name: value for name, value in terms.items() if name not in names}
    return cast("InputTerms", of_input), of_request

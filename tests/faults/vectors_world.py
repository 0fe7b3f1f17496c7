"""Worlds of models that pool: one that embeds, and one whose classifier scores pairs of texts."""

import json
import zlib
from array import array
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec

from aserve.core.errors import UnavailableError
from aserve.core.plan import SeqSlice, StepPlan, StepResult
from aserve.core.pooling import Pooling
from aserve.scheduler.scheduler import Scheduler
from tests.fakes import FakeKV
from tests.faults.world import BLOCK_SIZE, CHAT, DEAD_STATUS, LETTERS, MAX_MODEL_LEN, WHOSE, Answer, World

EMBEDDINGS = "/v1/embeddings"
LONG = "0123456789abcdef" * 33
HI = [{"role": "user", "content": "hi"}]


class PoolingKV(FakeKV):
    """Makes vectors of all that is read through a row's blocks. size: numbers of each."""

    def __init__(self, size: int) -> None:
        super().__init__(BLOCK_SIZE, LETTERS)
        self._size = size

    def run(self, plan: StepPlan) -> StepResult:
        """The step's result: no token, a vector for each slice that samples."""
        result = super().run(plan)
        vectors = tuple(self._vector(piece) for piece in plan.slices if piece.num_samples)
        return msgspec.structs.replace(result, token_ids=(0,) * len(vectors), vectors=vectors)

    def _vector(self, piece: SeqSlice) -> "array[float]":
        context = repr(self._context(self._rows[piece.row], piece.start + piece.num_tokens)).encode()
        return array("f", [zlib.crc32(context, place) % 1999 / 1000 - 1 for place in range(self._size)])


class VectorsWorld(World):
    """The model embeds."""

    pooling: ClassVar = Pooling(task="embed", method="last", size=4, activation="normalize", dimensions=())
    asked: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
        {
            "one": (EMBEDDINGS, {"input": "abc"}),
            "several": (EMBEDDINGS, {"input": ["ab", "cdef", "ghi"], "encoding_format": "base64"}),
            "ids": (EMBEDDINGS, {"input": [[1, 2, 3], [4]], "truncate_prompt_tokens": 2, "truncation_side": "left"}),
            "cut": (EMBEDDINGS, {"input": "cut to four", "truncate_prompt_tokens": 4}),
            "short": (EMBEDDINGS, {"input": "short", "dimensions": 2}),
            "long": (EMBEDDINGS, {"input": LONG}),
            "long again": (EMBEDDINGS, {"input": [LONG + "!", LONG[:40]]}),
            "large": (EMBEDDINGS, {"input": ["x" * 600] * 5}),
            "pooling": ("/pooling", {"input": "pool", "use_activation": False}),
            "score": ("/score", {"queries": "ab", "documents": ["abc", "x"]}),
            "rerank": ("/rerank", {"query": "ab", "documents": ["abc", {"text": "x"}], "top_n": 1}),
            "too long": (EMBEDDINGS, {"input": "x" * (MAX_MODEL_LEN + 1)}),
            "another task": ("/classify", {"input": "abc"}),
            "text": (CHAT, {"messages": HI}),
        }
    )
    asked_next = (EMBEDDINGS, {"input": "and now?"})

    def __init__(self, *, failing_steps: tuple[int, ...] = ()) -> None:
        self.formats = MappingProxyType({"pooling": self.pooling})
        super().__init__(failing_steps=failing_steps)

    def new_scheduler(self, **more: Any) -> Scheduler:
        """An input may fill the context, and one token comes behind it."""
        return super().new_scheduler(**{"max_model_len": MAX_MODEL_LEN + 1, **more})

    def new_model(self) -> FakeKV:
        """Makes vectors."""
        return PoolingKV(self.pooling.size)

    async def _leave(self, name: str) -> Answer:
        """A client who is gone before anything is computed for it."""
        answer = await self.ask(name, EMBEDDINGS, {"input": [LONG, "y"]}, leaves_after=-1)
        return Answer(escaped=answer.escaped, broken=answer.broken)

    async def _branch(self, name: str) -> Answer:
        """An embedder who uses no HTTP, and is told by what is raised."""
        WHOSE.set(name)
        try:
            told = await self._vectors()
        except BaseException as error:
            status = DEAD_STATUS if isinstance(error, UnavailableError) else 500
            body = {"error": {"message": type(error).__name__, "type": "", "param": None, "code": None}}
            return Answer(status, bytearray(json.dumps(body).encode()), is_whole=True)
        return Answer(200, bytearray(json.dumps(told).encode()), is_whole=True)

    async def _vectors(self) -> dict[str, Any]:
        embedded = await self.engine.embed("by itself")
        score = await self.engine.score("a query", "a document")
        return {"vector": embedded.values.tolist(), "score": score}


class ScoringWorld(VectorsWorld):
    """The model is a classifier with one label, which reads a query and a document."""

    pooling = Pooling(task="classify", method="last", size=1, activation="sigmoid")
    asked: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
        {
            "score": ("/score", {"text_1": "ab", "text_2": ["abc", "x"]}),
            "score each": ("/v1/score", {"queries": ["ab", "cd"], "documents": ["abc", "x"]}),
            "rerank": ("/v2/rerank", {"query": "ab", "documents": ["abc", "x", "yz"], "truncate_prompt_tokens": 4}),
            "large": ("/rerank", {"query": "large", "documents": ["x" * 600, "y" * 600, "z" * 600, "v" * 600]}),
            "classify": ("/classify", {"input": ["abc", [1, 2]]}),
            "pooling": ("/pooling", {"input": "pool", "use_activation": False}),
            "another task": (EMBEDDINGS, {"input": "abc"}),
        }
    )
    asked_next = ("/score", {"queries": "and", "documents": "now?"})

    async def _leave(self, name: str) -> Answer:
        """A client who is gone before anything is computed for it."""
        answer = await self.ask(name, "/classify", {"input": [LONG, "y"]}, leaves_after=-1)
        return Answer(escaped=answer.escaped, broken=answer.broken)

    async def _vectors(self) -> dict[str, Any]:
        classified = await self.engine.classify("by itself")
        score = await self.engine.score("a query", "a document")
        return {"vector": classified.values.tolist(), "score": score}

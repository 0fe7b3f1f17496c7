"""Worlds whose vectors a real runner computes: of a decoder, whose hidden states are pooled, and of an encoder."""

import zlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from aserve.core.pooling import Pooling
from aserve.models.pooler_head import PoolerHead
from aserve.runner.encoder import EncoderRunner
from aserve.runner.pooling import Pools
from aserve.runner.runner import ModelRunner
from aserve.scheduler.scheduler import Scheduler
from tests.faults.computed_world import CPU, NobodyComes, SpeakingLM, new_kv
from tests.faults.vectors_world import EMBEDDINGS, VectorsWorld
from tests.faults.world import MAX_MODEL_LEN, InlineExecutor
from tests.runner.recordable import RecordableOps

SIZE = 4
CHUNK = 32
"""Tokens of a step, so that longer inputs come in several."""


class PooledWorld(VectorsWorld):
    """The mean of a decoder's hidden states, which each chunk of an input adds to."""

    pooling = Pooling(task="embed", method="mean", size=SIZE, activation="none")
    asked: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
        {
            "one": (EMBEDDINGS, {"input": "abc"}),
            "several": (EMBEDDINGS, {"input": ["ab", "cdef", "abc"]}),
            "long": (EMBEDDINGS, {"input": "0123456789" * 7}),
            "ids": (EMBEDDINGS, {"input": [[1, 2, 3], [4]]}),
            "score": ("/score", {"queries": "ab", "documents": ["abc", "x"]}),
        }
    )

    def __init__(self, *, failing_steps: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.runner = self.new_runner(failing_steps)
        self.runner._worker = InlineExecutor(1)

    def new_runner(self, failing: Sequence[int]) -> Any:
        """Its thread is the event loop's. failing: raises at these forward passes."""
        weight = torch.arange(1.0, SIZE + 1)[:, None]
        runner = ModelRunner(
            SpeakingLM(failing),
            RecordableOps(),
            new_kv(),
            max_num_seqs=12,
            max_model_len=MAX_MODEL_LEN,
            pools=Pools("mean", PoolerHead([(weight, None, torch.cos)])),
        )
        runner._submitted = NobodyComes()  # type: ignore[assignment]  # all that is asked of it
        return runner

    def new_scheduler(self, **more: Any) -> Scheduler:
        """Nothing of what is cached would be pooled, and rows keep what is pooled of an input so far."""
        rows = {"enable_prefix_caching": False, "has_row_state": True}
        return super().new_scheduler(**more, **rows, max_num_batched_tokens=CHUNK)


class HashEncoder:
    """Makes numbers of all tokens of a sequence. failing: raises at these calls, counted from 0."""

    device = CPU
    pads = False

    def __init__(self, failing: Sequence[int]) -> None:
        self._failing = failing
        self._num_calls = -1

    def __call__(self, sequences: Sequence[tuple[Sequence[int], int | None]]) -> Tensor:
        """A row of numbers each."""
        self._num_calls += 1
        if self._num_calls in self._failing:
            raise ValueError
        hashes = [[zlib.crc32(repr(one).encode(), place) % 1999 for place in range(SIZE)] for one in sequences]
        return torch.tensor(hashes, dtype=torch.float32)


class EncodedWorld(PooledWorld):
    """Whole inputs, as an encoder takes them."""

    def new_runner(self, failing: Sequence[int]) -> Any:
        """As that of a decoder."""
        return EncoderRunner(HashEncoder(failing))  # type: ignore[arg-type]  # all that is asked of it

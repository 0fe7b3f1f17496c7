"""A world whose steps a real `ModelRunner` computes, with a model that shows everything it reads: the device's rooms.

The runner's thread is the event loop's own. The model is `ToyLM`, which says letters; an adapter changes the hash of
each token by its mark, a second such model makes drafts, and answers with a structure have masks.
"""

import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from aserve.adapters import Adapters
from aserve.core.speculation import StepSeconds
from aserve.drafting.draft_model import DraftModelProposer
from aserve.kernels.ops import KVLayer
from aserve.models.interface import ForwardBatch
from aserve.models.lora import LoraLayers
from aserve.runner.draft_model import DraftModel
from aserve.runner.kv_store import KVStore, allocate_kv
from aserve.runner.runner import ModelRunner
from aserve.scheduler.scheduler import Scheduler
from tests.adapters import write_factors
from tests.engines import VOCAB_SIZE
from tests.faults.world import BLOCK_SIZE, LETTERS, MAX_MODEL_LEN, NUM_BLOCKS, TEXT, InlineExecutor, World
from tests.runner.recordable import RecordableOps
from tests.runner.toy import ToyLM

CPU = torch.device("cpu")
SIZE = 16
NUM_DRAFTS = 3
GREEDY = {"temperature": 0}
ASKED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "first": (TEXT, GREEDY | {"model": "first", "prompt": "abcabc", "max_tokens": 5}),
    "second": (TEXT, GREEDY | {"model": "second", "prompt": "abcabc", "max_tokens": 5, "stream": True}),
    "third": (TEXT, GREEDY | {"model": "third", "prompt": "abcabc", "max_tokens": 5}),
    "first again": (TEXT, GREEDY | {"model": "first", "prompt": "dabc", "max_tokens": 4}),
    "forced": (TEXT, GREEDY | {"prompt": "x", "structured_outputs": {"regex": "(ab|ba)cdcdcdcd(ab|ba)"}}),
    "drafted": (TEXT, GREEDY | {"prompt": "dcba", "max_tokens": 14, "frequency_penalty": 1.0}),
    "biased": (TEXT, GREEDY | {"prompt": "bias", "max_tokens": 9, "logit_bias": {"97": -3.0}, "stream": True}),
    "sampled": (TEXT, {"prompt": "some", "max_tokens": 8, "temperature": 1, "seed": 3, "n": 2, "stream": True}),
    "scored": (TEXT, GREEDY | {"prompt": "score", "max_tokens": 4, "logprobs": 1, "echo": True}),
    "plain": (TEXT, GREEDY | {"prompt": "plain", "max_tokens": 6}),
}


class SpeakingLM(ToyLM):
    """Says letters. failing: raises at these forward passes, counted from 0. layers: of adapters, if there are any."""

    spec = msgspec.structs.replace(ToyLM.spec, vocab_size=VOCAB_SIZE, context_len=MAX_MODEL_LEN)

    def __init__(self, failing: Sequence[int] = (), layers: LoraLayers | None = None) -> None:
        self._failing = failing
        self._layers = layers
        self._num_passes = -1

    def forward(self, token_ids_T: Tensor, kv: Sequence[KVLayer], batch: ForwardBatch) -> Tensor:
        self._num_passes += 1
        if self._num_passes in self._failing:
            raise ValueError
        hidden_T1 = super().forward(token_ids_T, kv, batch)
        if batch.lora is None or self._layers is None:
            return hidden_T1
        for slot, (first, last) in enumerate(zip(batch.lora.starts_G1, batch.lora.starts_G1[1:], strict=False)):
            hidden_T1[batch.lora.tokens_N[first:last]] += float(self._layers._memory_GN[slot, 0])
        return hidden_T1

    def logits(self, hidden_SE: Tensor) -> Tensor:
        logits_SV = 3 * torch.cos(hidden_SE * torch.arange(1, VOCAB_SIZE + 1))
        logits_SV[:, list(LETTERS)] += 50
        return logits_SV.float()


@cache
def _folders() -> tuple[tempfile.TemporaryDirectory[str], dict[str, str]]:
    """Adapters' folders, by name; they are there for as long as the first value is."""
    root = tempfile.TemporaryDirectory()
    return root, {
        name: str(write_factors(Path(root.name) / name, {"x": (torch.full((2, SIZE), mark), torch.ones(SIZE, 2))}))
        for name, mark in {"first": 10.0, "second": 20.0, "third": 30.0}.items()
    }


def new_kv() -> KVStore:
    """Of either model."""
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
    return allocate_kv(SpeakingLM.spec, **sizes, dtype=torch.float32, device=CPU)


class NobodyComes:
    """In place of the event that wakes a runner which fills in what is missing: nothing is submitted meanwhile."""

    def set(self) -> None:
        """As threading.Event's."""

    def clear(self) -> None:
        """As threading.Event's."""

    def wait(self, timeout: float) -> bool:
        """At once."""
        del timeout
        return False


class ComputedWorld(World):
    """Three adapters, two of them in slots and in memory at a time."""

    asked = ASKED

    def __init__(self, *, failing_steps: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.layers = LoraLayers(2, 16, RecordableOps(), torch.float32, CPU)
        self.layers.new_layer({"x": SIZE}, SIZE)
        self.layers.allocate()
        self.kv = new_kv()
        self.model = SpeakingLM(failing_steps, self.layers)
        sizes = {"max_num_seqs": 12, "max_model_len": MAX_MODEL_LEN}
        self.ops = RecordableOps()
        self.runner = ModelRunner(self.model, self.ops, self.kv, lora=self.layers, **sizes)
        self.runner._worker = InlineExecutor(1)
        self.runner._submitted = NobodyComes()
        self.runner._fills_in = True
        self.runner.draft_with(self._draft_model)
        self.adapters = Adapters(self.runner, max_loaded=2, taken=("scripted",))
        self.adapters._reader = InlineExecutor(1)
        for name, folder in _folders()[1].items():
            self.adapters.add_now(name, folder)

    def _draft_model(self, device: Any) -> DraftModel:
        sizes = {"num_rows": 6, "max_model_len": MAX_MODEL_LEN, "most": NUM_DRAFTS}
        return DraftModel(SpeakingLM(), RecordableOps(), new_kv(), device, **sizes)

    def new_scheduler(self, **more: Any) -> Scheduler:
        """With what adapters and drafts need."""
        proposer = DraftModelProposer(
            most=NUM_DRAFTS,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            num_rows=6,
            context_len=MAX_MODEL_LEN,
            max_catch_up=64,
            step_seconds=StepSeconds(0.0, 0.0),
        )
        return super().new_scheduler(proposer=proposer, max_loras=2, **more)

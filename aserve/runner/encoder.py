"""EncoderRunner: computes plans for a model that sees whole sequences at once, and has no cache.

The scheduler hands out prompts in chunks and blocks, as for any model. Here a chunk is put aside until its prompt's
last one comes; then the whole is computed, with others of its length. Blocks stand for nothing.

    slice without samples   its tokens wait in their row
    slice with a sample     the row is whole: it goes to the encoder in a batch of this step's

All state belongs to one thread, as in runner.py.
"""

import gc
from array import array
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import torch

from aserve.core.ids import Row, SeqId
from aserve.core.plan import SeqSlice, StepPlan, StepResult
from aserve.models.encoder import Encoder, Whole
from aserve.runner.failures import SkippedStepError, out_of_memory
from aserve.runner.flight import Landed, StepFlight
from aserve.runner.pooling import marked
from aserve.runner.sampler import without_token

FREE_PADDING: Final = 64
"""Tokens of padding in a batch that cost less than another batch."""
PADDING_SHARE: Final = 8
"""Of a batch an eighth may be padding besides."""

BATCH_TOKENS: Final = {"cpu": 1024}
"""Of a batch, padding included, by kind of device: what a layer makes of more leaves a CPU's caches."""
MOST_TOKENS: Final = 2**14
"""On others."""


class EncoderRunner:
    """A `Runner` of an encoder. None once it is closed."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder: Encoder | None = encoder
        self._batch_tokens = BATCH_TOKENS.get(encoder.device.type, MOST_TOKENS)
        self._rows: dict[Row, Whole] = {}
        self._per_token: set[Row] = set()
        self._halted = False
        """Set by a step that fails, for those behind it."""
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="aserve-encoder")

    def launch(self, plan: StepPlan) -> StepFlight:
        """Start a step and return at once. What it raises comes out of `land`, and of those behind it."""
        landed: Landed = Future()
        self._worker.submit(self._run, plan, landed)
        return StepFlight(landed)

    def recover(self) -> StepFlight:
        """As the Protocol says: a sequence of one token."""
        landed: Landed = Future()
        self._worker.submit(self._recover, landed)
        return StepFlight(landed)

    def warm_up(self) -> None:
        """Run the first call, so that no request pays for it. Blocking."""
        self._worker.submit(self._encode, [([0, 0], None)]).result()

    def close(self) -> None:
        """Wait for launched steps, then give back the thread and the weights. Idempotent."""
        self._worker.shutdown(wait=True)
        self._encoder = None
        self._rows.clear()
        gc.collect()

    def _recover(self, landed: Landed) -> None:
        self._halted = False
        self._run(StepPlan(-1, (SeqSlice(SeqId(-1), Row(-1), 0, 1, (0,), num_samples=1),)), landed)

    def _run(self, plan: StepPlan, landed: Landed) -> None:
        """One step, in the worker thread. Every way out resolves `landed`, or its reader would wait for ever."""
        try:
            if self._halted:
                raise SkippedStepError("the step before it failed")
            landed.set_result(self._result(plan))
        except BaseException as error:  # the edge of a thread
            self._halted = True
            landed.set_result(out_of_memory(error) or error)

    def _result(self, plan: StepPlan) -> StepResult:
        for init in plan.inits:
            self._rows[init.row] = ([], init.second_at)
            self._per_token.discard(init.row)
            if init.per_token:
                self._per_token.add(init.row)
        whole: list[Whole] = []
        per_token: set[int] = set()
        for piece in plan.slices:
            tokens, second_at = self._rows.setdefault(piece.row, ([], None))
            tokens[piece.start :] = piece.token_ids
            if piece.num_samples:
                if piece.row in self._per_token:
                    per_token.add(len(whole))
                whole.append((tokens, second_at))
        if not whole:
            return StepResult(plan.step_id, ())
        vectors, token_ids = self._encode(whole, per_token)
        failed = without_token(plan, token_ids)
        return StepResult(plan.step_id, token_ids, failed=failed, vectors=vectors)

    def _encode(
        self, whole: list[Whole], per_token: Collection[int] = ()
    ) -> tuple[tuple["array[float]", ...], tuple[int, ...]]:
        """What each sequence, or each token of those in `per_token`, is pooled to, and what stands for its token."""
        assert self._encoder is not None, "the runner is closed"
        outputs: dict[int, list[float]] = {}
        marks: dict[int, int] = {}
        pooled = [place for place in range(len(whole)) if place not in per_token]
        with torch.inference_mode():
            for place in per_token:
                vectors_TO = self._encoder.of_tokens(whole[place])
                outputs[place] = vectors_TO.reshape(-1).tolist()
                marks[place] = int(marked(vectors_TO).amin())
            lens = [len(whole[place][0]) for place in pooled]
            for own in batches(lens, self._batch_tokens, pads=self._encoder.pads):
                places = [pooled[index] for index in own]
                vectors_SO = self._encoder([whole[place] for place in places])
                outputs.update(zip(places, vectors_SO.tolist(), strict=True))
                marks.update(zip(places, marked(vectors_SO).tolist(), strict=True))
        order = range(len(whole))
        return tuple(array("f", outputs[place]) for place in order), tuple(marks[place] for place in order)


def batches(lens: list[int], most: int, *, pads: bool = True) -> Iterator[list[int]]:
    """Places of sequences that are computed together, longer ones first: where padding is computed too, of much the
    same length.

    most: tokens of a batch of several, padding included.
    """
    places: list[int] = []
    num_tokens = 0
    for place in sorted(range(len(lens)), key=lens.__getitem__, reverse=True):
        num_tokens += lens[place]
        num_padded = lens[places[0]] * (len(places) + 1) if places and pads else num_tokens
        num_free = FREE_PADDING + num_tokens // PADDING_SHARE
        if places and (num_padded > most or num_padded - num_tokens > num_free):
            yield places
            places, num_tokens = [], lens[place]
        places.append(place)
    if places:
        yield places

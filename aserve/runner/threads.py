"""How many of torch's threads a step on a CPU takes: a small step is slower for having several.

At each matrix product the threads wait for each other, which costs microseconds, and what a second thread computes has
to be worth them. With 5 million parameters a token takes 0.7 ms on one thread and 1.0 on two, 32 tokens 3.6 and 4.0;
with 400 million a token takes 25 ms on one and 21 on two, which are enough to read the weights (2 cores of an EPYC).
"""

from types import TracebackType
from typing import Final

import torch

from aserve.models.spec import ModelSpec

FLOPS_PER_THREAD: Final = 300_000_000


class StepThreads:
    """A context in which the calling thread uses as many threads as a step of `num_tokens` is worth.

    Never more than torch was told to use when this was made, and after the step as many again: torch hands the number
    that was set last to threads that are new to it.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._flops_per_token = flops_per_token(spec)
        self._max_threads = torch.get_num_threads()
        self._num_threads = self._max_threads

    def of(self, num_tokens: int) -> "StepThreads":
        """Itself, for a step of so many tokens."""
        self._num_threads = min(self._max_threads, max(1, num_tokens * self._flops_per_token // FLOPS_PER_THREAD))
        return self

    def __enter__(self) -> None:
        if self._num_threads != self._max_threads:
            torch.set_num_threads(self._num_threads)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._num_threads != self._max_threads:
            torch.set_num_threads(self._max_threads)


def flops_per_token(spec: ModelSpec) -> int:
    """Two for each weight of the layers' matrices, taken to be of Llama's shape, and of the head."""
    heads = 2 * spec.num_heads + 2 * spec.num_kv_heads
    per_layer = spec.hidden_size * (heads * spec.head_dim + 3 * spec.intermediate_size)
    return 2 * (spec.num_layers * per_layer + spec.vocab_size * spec.hidden_size)

"""What is chosen where the user chose nothing: by the kind of device, and by how large the model is."""

from collections.abc import Sequence
from typing import Final

from aserve.core.layout import Window

IN_MEMORY: Final = ":memory:"
"""In the place of a file's path: SQLite keeps it in memory."""
IDEMPOTENCY_BYTES: Final = 32 * 2**20
IDEMPOTENCY_AGE_S: Final = 3600.0
"""Answers to requests with an Idempotency-Key: how much of them is kept, and for how long."""
SMALL_MODEL_FLOPS: Final = 2_500_000_000
"""Per token: of a model of about a billion parameters."""
SLOW_CPU_FLOPS: Final = 100_000_000
"""Per token: a few milliseconds on two cores."""


def default_max_num_batched_tokens(device: str, flops_per_token: int) -> int:
    """Tokens a step computes at most. flops_per_token: of the model; 0 where that is not known.

    On a CPU a prompt has its first token when the step is over that computes its last part, and so have those that came
    with it. 512 tokens are four prompts of 128: with half a billion parameters some seconds on two slow cores, after
    which the next four follow, where the first of a step of 2048 wait for the last. Of a model that computes 2048 in
    a tenth of a second the pieces would be slower than the whole.
    """
    if device == "cuda":
        return 8192
    return 2048 if 0 < flops_per_token <= SLOW_CPU_FLOPS else 512


def default_max_num_seqs() -> int:
    """Sequences that run at once."""
    return 256


def default_max_num_queued_reqs(max_num_seqs: int | None) -> int:
    """Requests that wait for a server at most: who comes last waits for some four answers, not for an hour."""
    return 4 * (max_num_seqs or default_max_num_seqs())


def default_max_in_flight(device: str, flops_per_token: int, windows: Sequence[Window]) -> int:
    """How far the device runs ahead: a step that waits behind it hides what the host does between two of them.

    And it makes newcomers wait for a step more. On a CPU that is 25 ms with half a billion parameters, where the host's
    0.2 ms do not matter: there the next step is planned when the last has landed. Three steps wait on a GPU for a
    small model, whose steps take no longer than what else an event loop does. Sliding windows hold blocks for two.
    """
    if device == "cpu":
        return 1 if flops_per_token > SLOW_CPU_FLOPS else 2
    is_small = 0 < flops_per_token <= SMALL_MODEL_FLOPS
    return 4 if is_small and not any(windows) else 2

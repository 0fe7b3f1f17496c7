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

    On a CPU a small model computes 2048 in less time than in pieces of 512. They are 16 prompts of 128: of a wave of 32
    half have their first token while the others' are computed. Of a large model they take minutes, during which nobody
    else can come or go.
    """
    if device == "cuda":
        return 8192
    return 2048 if 0 < flops_per_token <= SMALL_MODEL_FLOPS else 512


def default_max_num_seqs() -> int:
    """Sequences that run at once."""
    return 256


def default_max_num_queued_reqs(max_num_seqs: int | None) -> int:
    """Requests that wait for a server at most: who comes last waits for some four answers, not for an hour."""
    return 4 * (max_num_seqs or default_max_num_seqs())


def default_itl_factor(device: str) -> float:
    """How much longer than without prompts a step may take in which somebody decodes, where no target is set.

    More on a CPU, which computes a hundred tokens of a prompt at half of the speed of a thousand.
    """
    return 4.0 if device == "cpu" else 2.5


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

"""What a step of a runner may fail of, in words that the engine knows."""

from typing import Final

import torch

from aserve.core.errors import InsufficientMemoryError

OUT_OF_MEMORY: Final = ("DefaultCPUAllocator", "out of memory")
"""What torch's errors say that have no class of their own."""


class SkippedStepError(RuntimeError):
    """A step was launched behind one that failed, and was not computed."""


def out_of_memory(error: BaseException) -> InsufficientMemoryError | None:
    """The error as the one that says that memory ran out, if it does."""
    is_so = isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)
    )
    if not is_so:
        return None
    told = InsufficientMemoryError("memory ran out while this request was computed")
    told.__cause__ = error
    return told

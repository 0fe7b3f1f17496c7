"""What a rank is told when it is started: one line of JSON, on its command line. And which device is its own."""

from typing import TYPE_CHECKING, Final

import msgspec

from aserve.core.config import Options
from aserve.core.errors import ConfigError
from aserve.loading import choose_device

if TYPE_CHECKING:
    import torch

ONE_DAY_S: Final = 86_400.0
"""For which a rank waits for another in a step, where steps may take for ever."""


class RankTask(msgspec.Struct, frozen=True):
    """options: of the engine, whose model is a folder by now. path: of the file where ranks meet. num_threads: of a
    step's, on a CPU.
    """

    options: Options
    rank: int
    path: str
    num_threads: int

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.options.tensor_parallel_size


def rank_device(wish: str, rank: int, size: int) -> "torch.device":
    """That of a rank: a GPU each, or the CPU for all. Raises `ConfigError` where there are not as many GPUs."""
    import torch

    first = choose_device(wish)
    if size == 1 or first.type != "cuda":
        return first
    num_gpus = torch.cuda.device_count()
    if num_gpus < size:
        raise ConfigError(f"tensor_parallel_size {size}: torch finds {num_gpus} GPU{'s' * (num_gpus > 1)} here")
    device = torch.device("cuda", ((first.index or 0) + rank) % num_gpus)
    if rank:
        torch.cuda.set_device(device)
    return device


def patience_s(options: Options) -> float:
    """For which a rank waits for another in a step."""
    return options.step_timeout or ONE_DAY_S

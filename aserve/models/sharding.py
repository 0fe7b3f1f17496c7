"""Which part of a model a rank has, where several processes compute it together (tensor parallelism).

As Megatron-LM does it (Shoeybi et al., arXiv 1909.08053): the layers into a block are split by outputs, so that each
rank has some of the heads, or of the inner dimension, and the layers out of it by inputs. Each rank then has a part of
a sum, which one all_reduce completes. Embeddings and the output head are split by the vocabulary.

    rank 0   x -> q k v of heads 0 1 -> attend -> their part of o -.
                                                                   + all_reduce -> x, the same on both
    rank 1   x -> q k v of heads 2 3 -> attend -> their part of o -'

A rank has a `ModelSpec` of its own, with its heads and its part of the inner dimension, by which models, caches and
memory are laid out as ever. Where a share lies in a tensor of the checkpoint is said here. Loads no torch.
"""

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from aserve.core.errors import ConfigError
from aserve.models.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor


class Split(enum.Enum):
    """How the ranks share a tensor [outputs, inputs], or a vector of outputs."""

    OUTPUTS = "outputs"
    INPUTS = "inputs"
    VOCABULARY = "vocabulary"

    @property
    def dim(self) -> int:
        """The dimension of which a rank has a part."""
        return 1 if self is Split.INPUTS else 0


class Group(Protocol):
    """The ranks of a model, as one of them sees them.

    All of them call the same of these in the same order, with tensors of equal shapes, which lie in one piece. Raises
    RuntimeError where another rank has left.
    """

    def all_reduce(self, x: "Tensor") -> None:
        """Put the sum of what the ranks have in its place."""
        ...

    def gather(self, x: "Tensor") -> "list[Tensor] | None":
        """On rank 0 what each of them has, in order; None on the others."""
        ...

    def broadcast(self, x: "Tensor") -> None:
        """Put what rank 0 has in its place."""
        ...

    def leave(self) -> None:
        """Have whatever others wait for in this group raise, and what they call later. Idempotent, in any thread."""
        ...

    def join(self) -> None:
        """Be in it, or in it again after a `leave`: waits until all ranks are. Raises RuntimeError if they are not."""
        ...


@dataclass(frozen=True, slots=True)
class Shard:
    """Which of how many ranks this is. group: None where it is alone."""

    rank: int = 0
    size: int = 1
    group: Group | None = None

    def start(self, split: Split, full: int, share: int) -> int:
        """Where its share of a dimension begins. Where shares are fewer than ranks, neighbours have the same one."""
        if split is Split.VOCABULARY:
            return self.rank * share
        assert full % share == 0, f"{full} are no shares of {share}"
        return self.rank * (full // share) // self.size * share


ALONE = Shard()


def share_of(spec: ModelSpec, size: int) -> ModelSpec:
    """What one of so many ranks has of a model. Raises `ConfigError` where they cannot share it evenly."""
    if size == 1:
        return spec
    for what, number in (("attention heads", spec.num_heads), ("inner dimensions", spec.intermediate_size)):
        if number % size:
            raise ConfigError(f"tensor_parallel_size {size} does not divide the model's {number} {what}")
    if spec.num_kv_heads % size and size % spec.num_kv_heads:
        raise ConfigError(
            f"tensor_parallel_size {size} neither divides the model's {spec.num_kv_heads} key and value heads, "
            "nor is a multiple of them"
        )
    return msgspec.structs.replace(
        spec,
        num_heads=spec.num_heads // size,
        num_kv_heads=max(1, spec.num_kv_heads // size),
        intermediate_size=spec.intermediate_size // size,
        num_ranks=size,
    )

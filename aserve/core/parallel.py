"""The options of a model that several processes compute together, as vLLM names them."""

from collections.abc import Mapping
from typing import Final, TypedDict

import msgspec

from aserve.core.rules import Rule, count

MAX_RANKS: Final = 64


class ParallelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `Options` that are about ranks.

    tensor_parallel_size: processes that compute each step together, with a part of every layer each; 1 is none besides
    the engine's own.
    """

    tensor_parallel_size: int = 1


class ParallelFields(TypedDict, total=False):
    """The fields of `ParallelOptions` as keyword arguments."""

    tensor_parallel_size: int


PARALLEL_RULES: Final[Mapping[str, Rule]] = {"tensor_parallel_size": count(MAX_RANKS)}

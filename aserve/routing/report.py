"""ReplicaReport: what a replica tells who routes to it, and ReplicaLoad: of that, what says how many replicas to have.

Both become dicts of builtins and back, so that they travel by whatever carries those.
"""

from collections.abc import Mapping
from typing import Any, Final, Self

import msgspec

BYTES_PER_TOKEN: Final = 4.0
"""Of text, before it was measured."""
MOST: Final = float(2**53)
"""Of any count: beyond it floats have gaps."""
MAX_ADAPTERS: Final = 1024
_BOUNDS: Final = {"tokens_per_s": (0.001, 1e9), "bytes_per_token": (0.25, 256.0)}


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """waiting_tokens: of prompts, yet to be computed. tokens_per_s: None before it was measured.

    num_computed_tokens: of prompts and answers, since the replica's start. num_requests: open.
    """

    waiting_tokens: float = 0.0
    tokens_per_s: float | None = None
    num_computed_tokens: float = 0.0
    num_requests: float = 0.0

    def to_stats(self) -> dict[str, float]:
        """As numbers by name; what was not measured is 0."""
        return {name: float(value or 0.0) for name, value in msgspec.structs.asdict(self).items()}

    @classmethod
    def from_stats(cls, stats: Mapping[str, float]) -> Self:
        """From `to_stats`; what is missing, or is no such number, is as if it had not been told."""
        given = {name: stats.get(name, 0.0) for name in cls.__struct_fields__}
        told = {name: float(value) if _is_amount(value) else 0.0 for name, value in given.items()}
        speed = told.pop("tokens_per_s") or None
        return cls(tokens_per_s=speed, **told)


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Of one replica at a moment.

    taken_at: its clock then, in Unix seconds. waiting_tokens: of prompts, yet to be computed, of those who run, too.
    tokens_per_s: measured on full steps; None before there was one. num_requests: open.
    num_arrived_tokens, num_computed_tokens: since its start; of prompts that came, and of all that was computed.
    bytes_per_token: of prompts' text. adapters: that are loaded, by name.
    digest: see digest.py; None where the replica tells nothing of its cache.

    Raises ValueError, naming the field, for a number out of bounds.
    """

    taken_at: float
    waiting_tokens: int = 0
    tokens_per_s: float | None = None
    num_requests: int = 0
    num_arrived_tokens: int = 0
    num_computed_tokens: int = 0
    bytes_per_token: float = BYTES_PER_TOKEN
    adapters: tuple[str, ...] = ()
    digest: bytes | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            least, most = _BOUNDS.get(name, (0, MOST))
            if isinstance(value, (int, float)) and not least <= value <= most:
                raise ValueError(f"{name} must be a number from {least} to {most:g}, got {value!r}")

    def to_dict(self) -> dict[str, Any]:
        """As builtins, the digest as bytes."""
        return {**msgspec.structs.asdict(self), "adapters": list(self.adapters)}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Self:
        """From `to_dict`. Raises ValueError, naming the field, for what it did not make; other names are ignored."""
        try:
            report: Self = msgspec.convert(told, cls, builtin_types=(bytes,))
        except msgspec.ValidationError as error:
            raise ValueError(f"a replica's report: {error}") from None
        return report

    def load(self) -> ReplicaLoad:
        """What matters to how many there should be."""
        return ReplicaLoad(
            waiting_tokens=self.waiting_tokens,
            tokens_per_s=self.tokens_per_s,
            num_computed_tokens=self.num_computed_tokens,
            num_requests=self.num_requests,
        )


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value <= MOST

"""The options of a recording: where it is written, what is in it, and how large it may become."""

from collections.abc import Mapping
from os import PathLike
from typing import Final

from aserve.core.errors import ConfigError
from aserve.core.lora import LoraFields, LoraOptions
from aserve.core.rules import Rule, count, flag, optional, path

MAX_RECORD_MB: Final = 2**20
DEFAULT_RECORD_MB: Final = 256


class RecordingOptions(LoraOptions, frozen=True, kw_only=True):
    """The fields of `Options` that are about a recording.

    record: the file, which must not exist; None records nothing. record_prompts: with the token ids of prompts, without
    which a replay cannot be checked. record_logprobs: with the logprob of each sampled token, for which each is scored.
    record_max_mb: millions of bytes after which it ends.
    """

    record: str | None = None
    record_prompts: bool = False
    record_logprobs: bool = False
    record_max_mb: int = DEFAULT_RECORD_MB

    def check_recording(self) -> None:
        """Raise `ConfigError` for what is said of a recording that there is not."""
        for name in ("record_prompts", "record_logprobs"):
            if getattr(self, name) and self.record is None:
                raise ConfigError(f"{name} needs record, the file to write")


class RecordingFields(LoraFields, total=False):
    """The fields of `RecordingOptions` as keyword arguments."""

    record: str | PathLike[str] | None
    record_prompts: bool
    record_logprobs: bool
    record_max_mb: int


RECORDING_RULES: Final[Mapping[str, Rule]] = {
    "record": optional(path),
    "record_prompts": flag,
    "record_logprobs": flag,
    "record_max_mb": count(MAX_RECORD_MB),
}

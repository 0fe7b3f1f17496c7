"""The options of adapters (LoRA), which are vLLM's where it has the same, and the names that adapters may have."""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from aserve.core.errors import ConfigError
from aserve.core.parallel import ParallelFields, ParallelOptions
from aserve.core.rules import Refused, Rule, count, flag, optional, path, sequence, text

MAX_RANK: Final = 256
MAX_LORAS: Final = 256
DEFAULT_LORAS: Final = 8
MAX_CPU_LORAS: Final = 4096
MAX_NAMES: Final = 4096
"""Adapters that are known by name, in memory or not."""
ADAPTER_NAME: Final = re.compile(r"^[!-<>-~]{1,256}\Z")
NAME_RULE: Final = "1 to 256 printable ASCII characters, none of them a space or ="
_MODULES: Final = "a mapping of names to folders, or a sequence of NAME=FOLDER or JSON objects"


class LoraOptions(ParallelOptions, frozen=True, kw_only=True):
    """The fields of `Options` that are about adapters.

    lora_modules: names and folders. max_loras: adapters that one step computes with; None for DEFAULT_LORAS, or for
    max_cpu_loras where that is less. max_lora_rank: of any of them. max_cpu_loras: adapters in host memory, those in
    use included. lora_root: the folder under which adapters may be loaded while the engine runs; None for nowhere.
    """

    enable_lora: bool = False
    lora_modules: tuple[tuple[str, str], ...] = ()
    max_loras: int | None = None
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_root: str | None = None

    def check_lora(self) -> None:
        """Raise `ConfigError` for what goes ill together."""
        if self.lora_modules and not self.enable_lora:
            raise ConfigError("lora_modules needs enable_lora")
        if self.num_cpu_loras < self.num_loras:
            raise ConfigError(f"max_cpu_loras must be at least max_loras ({self.max_loras}), got {self.max_cpu_loras}")

    @property
    def num_loras(self) -> int:
        """Adapters that one step computes with, at most."""
        return self.max_loras or min(DEFAULT_LORAS, self.max_cpu_loras or DEFAULT_LORAS)

    @property
    def num_cpu_loras(self) -> int:
        """Adapters in host memory, at most."""
        return self.max_cpu_loras or self.num_loras


class LoraFields(ParallelFields, total=False):
    """The fields of `LoraOptions` as keyword arguments."""

    enable_lora: bool
    lora_modules: Mapping[str, Any] | tuple[str, ...] | list[str]
    max_loras: int | None
    max_lora_rank: int
    max_cpu_loras: int | None
    lora_root: Any


def lora_modules(value: object) -> tuple[tuple[str, str], ...]:
    """The rule: names and folders, which may come as "name=folder", or as vLLM's JSON objects."""
    items = value.items() if isinstance(value, Mapping) else sequence(value, MAX_NAMES, _MODULES)
    modules = [_module(item) for item in items]
    names = [name for name, _ in modules]
    if len(set(names)) < len(names):
        raise Refused(_MODULES, f"the name {max(names, key=names.count)!r} twice")
    return tuple(modules)


class _JsonModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter as vLLM's --lora-modules takes it. base_model_name: there is one model only."""

    name: str
    path: str
    base_model_name: str | None = None


def _module(item: object) -> tuple[str, str]:
    item = text(item) if isinstance(item, str) else item
    if isinstance(item, str) and item.startswith("{"):
        try:
            module = msgspec.json.decode(item, type=_JsonModule)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Refused(f"{_MODULES}; as JSON it has name and path", f"{item!r}: {error}") from None
        item = (module.name, module.path)
    name, folder = item if isinstance(item, tuple) and len(item) == 2 else str(item).partition("=")[::2]
    folder = path(folder)
    if not isinstance(name, str) or not ADAPTER_NAME.fullmatch(name):
        raise Refused(f"{_MODULES}; a name has {NAME_RULE}")
    if not folder:
        raise Refused(_MODULES, f"{name!r} without a folder")
    return text(name), folder


LORA_RULES: Final[Mapping[str, Rule]] = {
    "enable_lora": flag,
    "lora_modules": lora_modules,
    "max_loras": optional(count(MAX_LORAS)),
    "max_lora_rank": count(MAX_RANK),
    "max_cpu_loras": optional(count(MAX_CPU_LORAS)),
    "lora_root": optional(path),
}

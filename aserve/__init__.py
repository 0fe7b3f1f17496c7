"""aserve serves large language models from one Python process.

Importing it is cheap: torch is loaded when an engine is entered, and each name below when it is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aserve.build import AsyncEngine
    from aserve.core.params import BeamParams, SamplingParams
    from aserve.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncEngine", "BeamParams", "SamplingParams", "__version__"]

_HOMES = {
    "AsyncEngine": "aserve.build",
    "BeamParams": "aserve.core.params",
    "LLM": "aserve.llm",
    "SamplingParams": "aserve.core.params",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'aserve' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)

"""aserve serves large language models from one Python process.

    async with AsyncEngine("demo") as engine:           # in an event loop of yours
        async for delta in engine.chat([{"role": "user", "content": "Hello!"}]):
            print(delta.text, end="")

    with LLM("demo") as llm:                            # in a script or a notebook
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].text)

A model that pools gives vectors: `LLM("folder").embed(["a text"])[0].values`.

`aserve.http.create_app(engine)` is the OpenAI API as an ASGI application. Importing aserve is cheap: torch is loaded
when an engine is entered, and each name below when it is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aserve.build import AsyncEngine
    from aserve.core.config import EngineConfig, ModelInfo, OptionFields, Options
    from aserve.core.errors import (
        AdapterError,
        AserveError,
        CheckpointError,
        ConfigError,
        ConstraintError,
        ContextLengthError,
        DeviceLostError,
        InsufficientMemoryError,
        InternalError,
        InvalidRequestError,
        ModelNotFoundError,
        NonFiniteLogitsError,
        OverloadedError,
        QueueTimeoutError,
        RankLostError,
        RateLimitError,
        RecordingError,
        RetryableError,
        StepFailedError,
        StepTimeoutError,
        StoreError,
        UnavailableError,
    )
    from aserve.core.explanation import Explanation
    from aserve.core.outputs import Completion, FinishReason, RequestTimings, TextDelta
    from aserve.core.params import BeamParams, SamplingParams
    from aserve.core.plan import TokenScores
    from aserve.core.pooling import InputTerms, Pooled, Pooling, PoolingParams
    from aserve.core.request import RequestTerms, SharedTerms
    from aserve.core.structured import StructuredOutputs
    from aserve.engine_parts import EngineState, Progress
    from aserve.llm import LLM
    from aserve.mailbox import Mailbox
    from aserve.scheduler.statistics import Statistics

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AdapterError",
    "AserveError",
    "AsyncEngine",
    "BeamParams",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "ConstraintError",
    "ContextLengthError",
    "DeviceLostError",
    "EngineConfig",
    "EngineState",
    "Explanation",
    "FinishReason",
    "InputTerms",
    "InsufficientMemoryError",
    "InternalError",
    "InvalidRequestError",
    "Mailbox",
    "ModelInfo",
    "ModelNotFoundError",
    "NonFiniteLogitsError",
    "OptionFields",
    "Options",
    "OverloadedError",
    "Pooled",
    "Pooling",
    "PoolingParams",
    "Progress",
    "QueueTimeoutError",
    "RankLostError",
    "RateLimitError",
    "RecordingError",
    "RequestTerms",
    "RequestTimings",
    "RetryableError",
    "SamplingParams",
    "SharedTerms",
    "Statistics",
    "StepFailedError",
    "StepTimeoutError",
    "StoreError",
    "StructuredOutputs",
    "TextDelta",
    "TokenScores",
    "UnavailableError",
    "__version__",
]

_NAMES = {
    "aserve.build": ("AsyncEngine",),
    "aserve.llm": ("LLM",),
    "aserve.core.params": ("BeamParams", "SamplingParams"),
    "aserve.core.request": ("RequestTerms", "SharedTerms"),
    "aserve.core.config": ("EngineConfig", "ModelInfo", "OptionFields", "Options"),
    "aserve.core.explanation": ("Explanation",),
    "aserve.core.outputs": ("Completion", "FinishReason", "RequestTimings", "TextDelta"),
    "aserve.core.plan": ("TokenScores",),
    "aserve.core.pooling": ("InputTerms", "Pooled", "Pooling", "PoolingParams"),
    "aserve.core.errors": (
        *("AdapterError", "AserveError", "CheckpointError", "ConfigError", "ConstraintError", "ContextLengthError"),
        *("DeviceLostError", "InsufficientMemoryError", "InternalError", "InvalidRequestError"),
        *("ModelNotFoundError", "NonFiniteLogitsError", "OverloadedError", "QueueTimeoutError"),
        *("RankLostError", "RateLimitError", "RecordingError", "RetryableError", "StepFailedError"),
        *("StepTimeoutError", "StoreError", "UnavailableError"),
    ),
    "aserve.core.structured": ("StructuredOutputs",),
    "aserve.engine_parts": ("EngineState", "Progress"),
    "aserve.mailbox": ("Mailbox",),
    "aserve.scheduler.statistics": ("Statistics",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'aserve' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

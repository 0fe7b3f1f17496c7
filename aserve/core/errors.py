"""What can go wrong through the caller or the world. A bug of ours is an `assert`, never one of these.

AserveError
├── InvalidRequestError          the caller's mistake; `param` names the field
│   ├── ContextLengthError       the prompt does not fit the context, or all of the KV cache
│   ├── ConstraintError          an answer cannot go on in the structure that was asked for
│   └── AdapterError             an adapter's folder cannot be served, and why
├── ModelNotFoundError           this engine does not serve that name
├── OverloadedError              too much is waiting; try again after `retry_after_s`
├── RateLimitError               this tenant has used up what it may; try again after `retry_after_s`
├── QueueTimeoutError            its deadline came while it waited, and nothing of it was computed
├── UnavailableError             loading, draining or closed; try again after `retry_after_s`
│   └── StoreError               a file that keeps what was uploaded or answered cannot be written or read
├── StepFailedError              this request made a step fail
├── NonFiniteLogitsError         the model's scores for this request are not numbers
├── InsufficientMemoryError      there is not enough memory to compute this request; try again after `retry_after_s`
├── StepTimeoutError             a step has not come back: the engine is lost
├── RankLostError                a process that computes a part of the model is gone: the engine is lost
├── DeviceLostError              a step of nobody's fails too: the engine is lost
├── InternalError                a bug of ours met this request; its `fault_id` is in the log
├── ConfigError                  a flag or option is wrong
├── RecordingError               a recording cannot be read, or not for what is asked of it
└── CheckpointError              a model folder cannot be served, and why
"""

from typing import Any


class AserveError(Exception):
    """Root of every error that aserve raises on purpose. `str(error)` is one line fit for a user.

    Each can be pickled and copied, and comes back with all its attributes.
    """

    code: str = "server_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        """Not by `__init__`, which has made the message of what it was given."""
        return _made_again, (type(self), self.args), self.__dict__


class InvalidRequestError(AserveError):
    """A request that cannot be answered as asked. `param` is the offending field's name, or None."""

    code = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """The prompt is longer than the context or than the whole KV cache; the message has both numbers."""

    code = "context_length_exceeded"


class ConstraintError(InvalidRequestError):
    """The structure asked for can be followed no further: it is too complex, or the vocabulary cannot say it."""

    code = "constraint_failed"

    def __init__(self, reason: str) -> None:
        super().__init__(f"the answer cannot go on in the structure that was asked for: {reason}", "structured")


class AdapterError(InvalidRequestError):
    """An adapter cannot be read or served with this model; the message is the one line to show."""

    code = "adapter_error"

    def __init__(self, message: str, param: str | None = "lora_path") -> None:
        super().__init__(message, param)


class ModelNotFoundError(AserveError):
    """The request names a model that this engine does not serve."""

    code = "model_not_found"


class RetryableError(AserveError):
    """The same request may succeed after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OverloadedError(RetryableError):
    """The waiting queue is full, or so long that the request would not be served before its deadline."""

    code = "engine_overloaded"


class RateLimitError(RetryableError):
    """The tenant has as many requests open, or has used as much of this minute, as its limits say."""

    code = "rate_limit_exceeded"


class QueueTimeoutError(RetryableError):
    """The request's deadline came while it waited; nothing of it was computed."""

    code = "queue_timeout"


class UnavailableError(RetryableError):
    """The engine is loading, draining, closed or dead."""

    code = "engine_unavailable"


class StoreError(UnavailableError):
    """A store's file cannot be written or read, as where the disk is full: what was asked for is not kept."""

    code = "store_unavailable"


class StepFailedError(AserveError):
    """Steps raise where this request runs alone; it ends, the engine goes on. Its `fault_id` is in the log."""

    code = "engine_error"

    def __init__(self, kind: str, fault_id: str) -> None:
        super().__init__(
            f"the engine failed at this request ({kind}, fault {fault_id}); the server's log has the details"
        )
        self.fault_id = fault_id


class NonFiniteLogitsError(AserveError):
    """The model's scores for this request are not finite: a broken checkpoint, or an overflow of its dtype."""

    code = "nan_logits"

    def __init__(self) -> None:
        super().__init__("the model's logits for this request are not finite numbers")


class InsufficientMemoryError(RetryableError):
    """Memory ran out, on the device or the host; for a request: even when it ran alone, a token at a time."""

    code = "insufficient_memory"


class StepTimeoutError(AserveError):
    """A step was still under way after so many seconds, and cannot be interrupted."""

    code = "engine_dead"

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"a step has not landed within {timeout_s:g} s (step_timeout)")


class DeviceLostError(AserveError):
    """After a failed step not even a step of one token, of nobody's, can be computed."""

    code = "engine_dead"

    def __init__(self) -> None:
        super().__init__("the device computes nothing any more")


class RankLostError(AserveError):
    """One of the processes that compute the model together has ended, or stands still; the message says which, how."""

    code = "engine_dead"


class InternalError(AserveError):
    """A bug of ours, or of a library, that this request met. What happened is in the log, under `fault_id`."""

    def __init__(self, fault_id: str) -> None:
        super().__init__(f"internal error (fault {fault_id}); the server's log has the details")
        self.fault_id = fault_id


class ConfigError(AserveError):
    """A flag, option or configuration file is wrong; the message names it, what was given, what is allowed."""

    code = "config_error"


class CheckpointError(AserveError):
    """A model cannot be found, read or served; the message is the one line to show."""

    code = "checkpoint_error"


class RecordingError(AserveError):
    """A recording cannot be read, or has not what is asked of it; the message is the one line to show."""

    code = "recording_error"


def _made_again(kind: type[AserveError], args: tuple[object, ...]) -> AserveError:
    """An error that has no attributes yet; who unpickles or copies sets them."""
    error = kind.__new__(kind, *args)
    error.args = args
    return error

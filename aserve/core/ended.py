"""EndedRequest: what is known of a request when it is over, for those who watch an engine."""

from collections.abc import Callable

import msgspec

from aserve.core.outputs import FinishReason, RequestTimings
from aserve.core.request import Request


class EndedRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request that nobody waits for any more, however it ended.

    model: the adapter that answered, or the model's first name.
    timings: as its reader was told, until the end.
    last_token_s: seconds from its arrival to its last token; None where there was none.
    num_tokens: of all choices. num_cached_tokens: of the prompt, found in the prefix cache.
    finish_reasons: of the choices that ended by themselves, in that order; (ABORT,) where the reader left before.
    error: the code of what it failed with, such as "step_failed"; None where it did not.
    """

    request: Request
    model: str
    timings: RequestTimings
    last_token_s: float | None
    num_tokens: int
    num_cached_tokens: int
    finish_reasons: tuple[FinishReason, ...]
    error: str | None = None


EndListener = Callable[[EndedRequest], None]
"""Told of each request when it is over, in the task that asked, on the event loop's thread. Must not wait."""

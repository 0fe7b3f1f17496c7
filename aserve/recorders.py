"""The scheduler of an engine that is recorded, and the tape that it tells, as `--record` says."""

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from aserve.core.config import EngineConfig, ModelInfo, Options
from aserve.recording.fingerprint import fingerprint
from aserve.recording.records import Header
from aserve.recording.scheduler import RecordedScheduler
from aserve.recording.tape import Tape
from aserve.scheduler.scheduler import Scheduler
from aserve.scheduling import make_scheduler

if TYPE_CHECKING:
    from aserve.models.checkpoint import Checkpoint

MB = 10**6


def scheduler_of(
    options: Options, config: EngineConfig, info: ModelInfo, checkpoint: "Checkpoint", device: str, dtype: str
) -> tuple[Scheduler, Callable[[], None]]:
    """The scheduler, recorded where the options say so, and what ends the recording.

    Raises `ConfigError` where the file cannot be made.
    """
    from aserve import __version__

    if options.record is None:
        return make_scheduler(config), _nothing
    header = Header(
        version=__version__,
        started_s=time.time(),
        model=info.names[0],
        fingerprint=fingerprint(checkpoint.config, checkpoint.weight_files),
        vocab_size=info.vocab_size,
        device=device,
        dtype=dtype,
        options=options,
        config=config,
        has_prompts=options.record_prompts,
        has_logprobs=options.record_logprobs,
    )
    tape = Tape(options.record, header, max_bytes=options.record_max_mb * MB)
    recorded = partial(RecordedScheduler, tape.tell, tape.give_up, scores_all=options.record_logprobs)
    return make_scheduler(config, recorded), tape.close


def _nothing() -> None:
    """Where nothing is recorded nothing ends."""

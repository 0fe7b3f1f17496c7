"""`aserve replay RECORDING`: a step of it shown, or all of them computed again and compared."""

import sys
from collections.abc import Mapping

import msgspec

from aserve.cli.checks import check_device, check_model
from aserve.cli.settings import Parsed
from aserve.cli.tool_flags import REPLAYED_WITH, ReplayOptions
from aserve.core.config import Options
from aserve.core.errors import ConfigError, RecordingError
from aserve.core.ids import SeqId
from aserve.core.plan import StepResult
from aserve.engine_parts import Progress
from aserve.recording.files import Recording
from aserve.recording.records import Init, Landed, Planned
from aserve.replay.replaying import Replay, Replayed, check_replayable
from aserve.replay.words import header_line, outcome_lines, step_lines


def run(parsed: Parsed, _environ: Mapping[str, str]) -> int:
    """Show, or replay; the exit status is 1 where something differs."""
    if parsed.argument is None:
        raise ConfigError("aserve replay needs a recording: aserve replay FILE")
    asked = parsed.of(ReplayOptions)
    recording = Recording(parsed.argument)
    print(header_line(recording.header, recording.num_bytes))
    if asked.step is not None and not asked.check:
        return _show(recording, asked.step)
    options = _options(recording.header.options, asked)
    check_device(options.device)
    check_model(options)
    check_replayable(recording, checks=asked.check)
    replayed, shown = _replayed(recording, options, asked)
    for line in (*outcome_lines(replayed, checked=asked.check), *shown):
        print(line)
    _tell_ending(recording)
    return 0 if not asked.check or replayed.comparison.is_equal else 1


def _options(recorded: Options, asked: ReplayOptions) -> Options:
    """Those of the recording, but for what is asked now, and without a recording of the replay."""
    given = {name: value for name in REPLAYED_WITH if (value := getattr(asked, name)) is not None}
    return msgspec.structs.replace(recorded, record=None, record_prompts=False, record_logprobs=False, **given)


def _show(recording: Recording, step_id: int) -> int:
    """One step, as it is in the file. Raises `RecordingError` where it is not."""
    inits: dict[SeqId, Init] = {}
    planned: Planned | None = None
    landed: Landed | None = None
    last = -1
    for record in recording.records():
        if isinstance(record, Planned):
            last = record.plan.step_id
            if last <= step_id:
                inits |= {init.seq_id: init for init in record.plan.inits}
            planned = record if last == step_id else planned
        elif isinstance(record, Landed) and record.step_id == step_id:
            landed = record
            break
    if planned is None:
        there_is = "none was recorded" if last < 0 else f"the last one is {last}"
        raise RecordingError(f"{recording.path}: there is no step {step_id}; {there_is}")
    print("\n".join(step_lines(planned, landed, inits)))
    return 0


def _replayed(recording: Recording, options: Options, asked: ReplayOptions) -> tuple[Replayed, list[str]]:
    """What came of it, and the lines of the step that was asked for."""
    import asyncio

    from aserve.build import load
    from aserve.model_folder import find_model
    from aserve.recording.fingerprint import fingerprint

    checkpoint = find_model(options)[0]
    if fingerprint(checkpoint.config, checkpoint.weight_files) != recording.header.fingerprint:
        print(f"aserve: {options.model} has other weights than {recording.header.model} had", file=sys.stderr)
    parts = load(options, _quiet, recording.header.config)
    lines: list[str] = []
    inits: dict[SeqId, Init] = {}

    def note(planned: Planned, landed: Landed, found: StepResult) -> None:
        inits.update((init.seq_id, init) for init in planned.plan.inits)
        if landed.step_id == asked.step:
            lines.extend(step_lines(planned, landed, inits, found))

    async def replay() -> Replayed:
        try:
            return await Replay(recording, parts.runner).run(asked.step, note)
        finally:
            await parts.close(is_stuck=False)

    return asyncio.run(replay()), lines


def _quiet(_progress: Progress) -> None:
    """Nobody looks on while the model is loaded."""


def _tell_ending(recording: Recording) -> None:
    if recording.ending:
        print(f"the recording ends here: {recording.ending}")

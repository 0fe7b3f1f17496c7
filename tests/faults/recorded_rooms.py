"""The fault points of a recorded engine: what is handed over, the tape's thread, and the file."""

from dataclasses import replace

from aserve.recording import tape
from aserve.recording.scheduler import RecordedScheduler
from aserve.recording.tape import Tape
from tests.faults.points import FAILING, Point, at, of
from tests.faults.recorded_world import RecordedWorld

HANDED_OVER = (
    # By the engine's thread.
    Point("record told", at((Tape, "tell")), of_nobody=True),
    Point("record arrived", at((RecordedScheduler, "_arrived")), of_nobody=True),
    Point("record ended", at((RecordedScheduler, "_ended")), of_nobody=True),
    Point("record owner", at((RecordedScheduler, "_owner")), of_nobody=True),
    Point("record scored", at((RecordedScheduler, "_scored")), of_nobody=True),
    Point("record as_asked", at((RecordedScheduler, "_as_asked")), of_nobody=True),
    Point("record taken_back", at((RecordedScheduler, "_taken_back")), of_nobody=True, failing_steps=FAILING),
)

WRITTEN = (
    # By the tape's.
    Point("tape oldest", at((Tape, "_oldest")), of_nobody=True),
    Point("tape settled", at((tape, "settled")), of_nobody=True),
    Point("tape as_written", at((Tape, "_as_written")), of_nobody=True),
    Point("tape name", at((Tape, "_name")), of_nobody=True),
    Point("tape pack", at((tape, "pack")), of_nobody=True),
    Point("tape frame", at((tape, "frame")), of_nobody=True),
    Point("tape write", at((Tape, "_write")), of_nobody=True),
    Point("file write", of("file", "write"), of_nobody=True),
)

RECORDED = tuple(replace(point, world=RecordedWorld) for point in (*HANDED_OVER, *WRITTEN))

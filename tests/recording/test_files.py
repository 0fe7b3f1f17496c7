"""The file of a recording: what is written is read, and what is damaged, cut off or too long is told in a line."""

import errno
import logging
import os
import stat
from pathlib import Path

import msgspec
import pytest

from aserve.core.config import Options
from aserve.core.errors import ConfigError, RecordingError
from aserve.core.ids import RequestId
from aserve.recording import tape as tapes
from aserve.recording.files import FRAME, MAGIC, Recording, landed_plans
from aserve.recording.fingerprint import fingerprint
from aserve.recording.plans import hidden
from aserve.recording.records import HIDDEN, Arrived, Ended, Landed, Plan, Planned, Trailer
from aserve.recording.scheduler import RecordedScheduler
from aserve.recording.tape import WHOLE, Tape
from tests.recording.recorded import PROMPTS, header, record
from tests.simulation.worlds import config_of


def of_kind(recording: Recording, kind: type) -> list:
    return [one for one in recording.records() if isinstance(one, kind)]


def test_what_happened_is_in_it(tmp_path: Path):
    recording = record(tmp_path / "a.rec")
    arrived = of_kind(recording, Arrived)
    assert [(one.request_id, one.num_prompt, one.num_sequences) for one in arrived] == [
        (f"r{number}", len(prompt), 1 + number % 2) for number, prompt in enumerate(PROMPTS)
    ]
    ended = {(one.request_id, one.index): one.num_tokens for one in of_kind(recording, Ended)}
    assert {key: num for key, num in ended.items() if key[0] != "r4"} == {
        (f"r{number}", index): 4 + 3 * number for number in (0, 1, 2, 3, 5) for index in range(1 + number % 2)
    }
    planned, landed = of_kind(recording, Planned), of_kind(recording, Landed)
    assert [one.plan.step_id for one in planned] == list(range(len(planned)))
    assert [one.step_id for one in landed] == [one.plan.step_id for one in planned][: len(landed)]
    assert recording.ending == WHOLE


def test_it_is_its_owners_alone(tmp_path: Path):
    record(tmp_path / "a.rec")
    assert stat.S_IMODE(os.stat(tmp_path / "a.rec").st_mode) == 0o600


def test_without_prompts_no_token_of_a_plan_is_in_it(tmp_path: Path):
    plans = [one.plan for one in of_kind(record(tmp_path / "a.rec", has_prompts=False), Planned)]
    told = {token_id for plan in plans for piece in plan.slices for token_id in piece.token_ids}
    assert told == {HIDDEN}
    whole = [one.plan for one in of_kind(record(tmp_path / "b.rec"), Planned)]
    assert {token_id for plan in whole for piece in plan.slices for token_id in piece.token_ids} > set(PROMPTS[0])
    assert hidden(whole[0]).slices == plans[0].slices


def test_blocks_that_are_equal_have_equal_names_and_no_others(tmp_path: Path):
    recording = record(tmp_path / "a.rec")
    chains = {(one.request_id, one.index): one.chain for one in of_kind(recording, Ended)}
    assert chains["r1", 0][:2] == chains["r3", 0][:2] == chains["r5", 0][:2]
    assert len(chains["r1", 0]) >= 2
    again = record(tmp_path / "b.rec")
    others = {name for one in of_kind(again, Ended) for name in one.chain}
    assert not others & {name for chain in chains.values() for name in chain}, "each recording has a key of its own"


def test_a_seed_of_63_bits_comes_back(tmp_path: Path):
    plan = of_kind(record(tmp_path / "a.rec"), Planned)[0].plan
    seed = 2**62 + 1
    init = msgspec.structs.replace(plan.inits[0], columns=(*plan.inits[0].columns[:-1], seed))
    packed = msgspec.msgpack.encode(msgspec.structs.replace(plan, inits=(init,)))
    assert msgspec.msgpack.decode(packed, type=Plan).inits[0].columns[-1] == seed


@pytest.mark.parametrize("lost", [1, 7, 40])
def test_a_file_that_is_cut_off_is_read_up_to_there(tmp_path: Path, lost: int):
    """As a process leaves it that is killed while it writes."""
    path = tmp_path / "a.rec"
    record(path)
    num_whole = len(list(Recording(path).records()))
    path.write_bytes(path.read_bytes()[:-lost])
    recording = Recording(path)
    assert len(list(recording.records())) < num_whole
    assert "cut off at byte" in recording.ending


def test_a_file_without_its_end_says_so(tmp_path: Path):
    path = tmp_path / "a.rec"
    record(path)
    whole = path.read_bytes()
    trailer_bytes = FRAME.size + FRAME.unpack(whole[_last_frame(whole) :][: FRAME.size])[0]
    path.write_bytes(whole[:-trailer_bytes])
    recording = Recording(path)
    list(recording.records())
    assert "it has no end" in recording.ending


def _last_frame(data: bytes) -> int:
    place = last = data.index(b"\n") + 1
    while place < len(data):
        last, place = place, place + FRAME.size + FRAME.unpack(data[place : place + FRAME.size])[0]
    return last


@pytest.mark.parametrize("place", [0.5, 0.9])
def test_a_damaged_file_is_refused_where_it_is_damaged(tmp_path: Path, place: float):
    path = tmp_path / "a.rec"
    record(path)
    data = bytearray(path.read_bytes())
    first = _last_frame(bytes(data[: data.index(b"\n") + 1])) if place == 0 else int(len(data) * place)
    data[first] ^= 0xFF
    path.write_bytes(bytes(data))
    with pytest.raises(RecordingError, match=r"damaged (at|before) byte \d+"):
        list(Recording(path).records())


def test_a_frame_whose_checksum_is_wrong_is_refused_though_it_can_be_unpacked(tmp_path: Path):
    path = tmp_path / "a.rec"
    record(path)
    data = bytearray(path.read_bytes())
    last = _last_frame(bytes(data))
    data[last + FRAME.size - 1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(RecordingError, match=f"damaged at byte {last}: the checksum of a frame is wrong"):
        list(Recording(path).records())


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "not a recording of aserve"),
        (b"{}", "not a recording of aserve"),
        (MAGIC + b"7\n", "a recording of format '7'; this aserve reads 1"),
        (MAGIC + b"1\n", "ends within its header"),
        (MAGIC + b"1\n\xff\xff\xff\xff\0\0\0\0", "a frame of 4294967295 bytes"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, data: bytes, told: str):
    path = tmp_path / "a.rec"
    path.write_bytes(data)
    with pytest.raises(RecordingError, match=told):
        Recording(path)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(RecordingError, match="No such file"):
        Recording(tmp_path / "a.rec")


def test_nothing_is_written_over(tmp_path: Path):
    path = tmp_path / "a.rec"
    path.write_text("dear")
    with pytest.raises(ConfigError, match="exists, and a recording is written over nothing"):
        Tape(str(path), header(config_of()), max_bytes=10**6)
    assert path.read_text() == "dear"


def test_a_full_recording_ends_and_the_engine_does_not(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    size = 2**14
    path = tmp_path / "a.rec"
    tape = Tape(str(path), header(config_of()), max_bytes=size)
    for number in range(40_000):
        tape.tell(Landed(number * 0.1, number, 0.01, (number * 7919 % 65521,)))
    tape.close()
    recording = Recording(path)
    records = list(recording.records())
    assert path.stat().st_size <= size
    assert isinstance(records[-1], Trailer)
    assert recording.ending == f"it has reached its size of {size} bytes"
    assert [record.getMessage() for record in caplog.records if "has ended" in record.getMessage()]
    tape.tell(Trailer(0.0, ""))
    assert not tape.is_on


def test_a_full_recording_is_no_matter_to_requests(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    recording = record(tmp_path / "a.rec", max_bytes=900)
    assert "it has reached its size" in next(iter([*recording.records(), recording.ending][-1:]))


class _FullDisk:
    """Takes the header, and nothing more."""

    def __init__(self, file) -> None:
        self._file = file
        self._num_written = 0

    def write(self, data) -> int:
        self._num_written += 1
        if self._num_written > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(data)

    def close(self) -> None:
        self._file.close()


def test_a_full_disk_ends_the_recording_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    create = tapes.create
    monkeypatch.setattr(tapes, "create", lambda path: _FullDisk(create(path)))
    recording = record(tmp_path / "a.rec")
    assert list(recording.records()) == []
    [line] = [one.getMessage() for one in caplog.records]
    assert line.startswith(f"the recording {tmp_path / 'a.rec'} has ended after")
    assert line.endswith("cannot be written: No space left on device")


def test_records_that_come_too_fast_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tapes, "MAX_WAITING", 10)
    tape = Tape(str(tmp_path / "a.rec"), header(config_of()), max_bytes=10**6)
    for number in range(20):
        tape.tell(Landed(0.0, number, 0.01, ()))
    tape.close()
    recording = Recording(tmp_path / "a.rec")
    assert len(list(recording.records())) == 12, "eleven, and the end"
    assert recording.ending == "over 10 records waited to be written"


def test_what_cannot_be_told_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """A recording that misses something is none: it ends before that, and the engine goes on."""
    calls = iter(range(100))
    ended = RecordedScheduler._ended

    def failing(self: RecordedScheduler, *arguments) -> Ended:
        if next(calls) == 2:
            raise MemoryError("secret")
        return ended(self, *arguments)

    monkeypatch.setattr(RecordedScheduler, "_ended", failing)
    recording = record(tmp_path / "a.rec")
    assert len(of_kind(recording, Ended)) == 2
    assert recording.ending == "a record could not be made: builtins.MemoryError"
    [line] = [one.getMessage() for one in caplog.records]
    assert line.startswith(f"the recording {tmp_path / 'a.rec'} has ended after")
    assert "secret" not in line
    assert next(calls) > 3, "nobody was kept from ending"


def test_steps_that_were_taken_back_are_left_out(tmp_path: Path):
    recording = record(tmp_path / "a.rec", land_errors={3: RuntimeError("once")})
    planned = [one.plan.step_id for one in of_kind(recording, Planned)]
    kept = [one.plan.step_id for one in landed_plans(recording) if isinstance(one, Planned)]
    assert 3 in planned
    assert 3 not in kept
    assert {one.step_id for one in of_kind(recording, Landed)} <= set(kept)


def test_the_fingerprint_is_of_config_and_weights(tmp_path: Path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(100))
    one = fingerprint({"a": 1}, [weights])
    assert one == fingerprint({"a": 1}, [weights])
    assert one != fingerprint({"a": 2}, [weights])
    weights.write_bytes(bytes(99) + b"\1")
    assert one != fingerprint({"a": 1}, [weights])


def test_options_of_a_recording_that_there_is_not():
    with pytest.raises(ConfigError, match="record_prompts needs record"):
        Options(record_prompts=True)
    with pytest.raises(ConfigError, match="record_max_mb must be at least 1, got 0"):
        Options(record="a.rec", record_max_mb=0)


def test_a_request_is_written_down_as_one_of_which_nothing_was_asked_where_nothing_is_said():
    assert msgspec.structs.astuple(Arrived(1.0, RequestId("a"), 0.5, 3, 2, 7))[6:] == (
        0,
        "",
        1.0,
        None,
        False,
        False,
        None,
    )

"""Replays by a runner without a model: what is equal, and where a planted difference is found."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from aserve.core.errors import RecordingError
from aserve.core.ids import Row, SeqId
from aserve.core.plan import SeqSlice, StepPlan, StepResult
from aserve.recording.files import Recording, first_bytes, frame, landed_plans, pack
from aserve.recording.records import Landed, Plan, Planned
from aserve.replay.forced import ForcedMask
from aserve.replay.replaying import Replay, Replayed, check_replayable
from aserve.replay.words import difference, outcome_lines, step_lines
from tests.fakes import FakeKV, ScriptedRunner, masks_of
from tests.recording.recorded import VOCABULARY, record, runner


def replayed(recording: Recording, by: ScriptedRunner | None = None, last_step: int | None = None) -> Replayed:
    return asyncio.run(Replay(recording, by or runner()).run(last_step))


class Wrong(FakeKV):
    """Samples another token in one step, once."""

    def __init__(self, step_id: int, place: int) -> None:
        super().__init__(8, VOCABULARY, seeded=True)
        self._wrong = step_id, place

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        step_id, place = self._wrong
        if plan.step_id != step_id:
            return result
        token_ids = list(result.token_ids)
        token_ids[place] = 300
        return msgspec.structs.replace(result, token_ids=tuple(token_ids))


class Failing(FakeKV):
    """Finds no finite logits for the first who samples in one step."""

    def __init__(self, step_id: int) -> None:
        super().__init__(8, VOCABULARY, seeded=True)
        self._step_id = step_id

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        if plan.step_id != self._step_id:
            return result
        seq_id = next(piece.seq_id for piece in plan.slices if piece.num_samples)
        return msgspec.structs.replace(result, failed=(seq_id,))


@pytest.mark.parametrize("num_blocks", [64, 12])
def test_the_same_plans_bring_the_same_tokens(tmp_path: Path, num_blocks: int):
    recording = record(tmp_path / "a.rec", num_blocks=num_blocks, max_model_len=64)
    found = replayed(recording).comparison
    assert found.is_equal
    assert found.num_tokens == found.num_equal > 50
    inits = [init.seq_id for one in landed_plans(recording) if isinstance(one, Planned) for init in one.plan.inits]
    assert (len(inits) > len(set(inits))) == (num_blocks == 12), "memory is short in one of them, and rows come back"


def test_plans_are_launched_as_they_were(tmp_path: Path):
    recording = record(tmp_path / "a.rec")
    by = runner()
    replayed(recording, by)
    plans = [one.plan for one in recording.records() if isinstance(one, Planned)]
    assert [(plan.step_id, plan.slices, plan.block_ops) for plan in by.plans] == [
        (plan.step_id, plan.slices, plan.block_ops) for plan in plans
    ]
    assert [init.sampling.columns.seed for plan in by.plans for init in plan.inits] == [
        init.columns[-1] for plan in plans for init in plan.inits
    ]


@pytest.mark.parametrize(("step_id", "place"), [(2, 0), (5, 3), (9, 1)])
def test_a_planted_difference_is_found_where_it_is(tmp_path: Path, step_id: int, place: int):
    recording = record(tmp_path / "a.rec")
    found = replayed(recording, ScriptedRunner(model=Wrong(step_id, place))).comparison
    plan = next(one.plan for one in recording.records() if isinstance(one, Planned) and one.plan.step_id == step_id)
    landed = next(one for one in recording.records() if isinstance(one, Landed) and one.step_id == step_id)
    piece = [piece for piece in plan.slices if piece.num_samples][place]
    assert found.first is not None
    assert (found.first.what, found.first.step_id, found.first.row) == ("token", step_id, piece.row)
    assert (found.first.recorded, found.first.found) == (landed.token_ids[place], 300)
    assert found.first.position == piece.start + piece.num_tokens
    assert found.num_equal == found.num_tokens - 1, "the fake's history is that of its blocks"
    assert f"step {step_id}, row {piece.row}, request {found.first.request_id}" in difference(found.first)


def test_a_token_that_only_one_of_them_has_is_a_difference(tmp_path: Path):
    found = replayed(record(tmp_path / "a.rec"), ScriptedRunner(model=Failing(3))).comparison
    assert found.first is not None
    assert (found.first.what, found.first.step_id) == ("failure", 3)
    assert (found.first.recorded, found.first.found) == (False, True)


def test_logprobs_are_compared_bit_by_bit(tmp_path: Path):
    recording = record(tmp_path / "a.rec", scores_all=True)
    found = replayed(recording).comparison
    assert found.num_logprobs == found.num_tokens
    assert found.is_equal

    class Near(FakeKV):
        def run(self, plan: StepPlan) -> StepResult:
            result = super().run(plan)
            if plan.step_id != 4:
                return result
            first = result.scores[0]
            near = msgspec.structs.replace(first, logprob=first.logprob + 1e-9)
            return msgspec.structs.replace(result, scores=(near, *result.scores[1:]))

    found = replayed(recording, ScriptedRunner(model=Near(8, VOCABULARY, seeded=True))).comparison
    assert found.first is None
    assert found.first_logprob is not None
    assert found.first_logprob.step_id == 4
    assert found.largest_logprob == pytest.approx(1e-9, rel=1e-3)


def test_scores_for_the_recording_are_seen_by_nobody_else(tmp_path: Path):
    """The answers, and the scheduler's plans, are those of an engine that records no logprobs."""
    one, other = record(tmp_path / "a.rec", scores_all=True), record(tmp_path / "b.rec")

    def tokens(recording: Recording) -> list[tuple[int, ...]]:
        return [record.token_ids for record in recording.records() if isinstance(record, Landed)]

    assert tokens(one) == tokens(other)


def test_it_ends_with_a_step(tmp_path: Path):
    recording = record(tmp_path / "a.rec")
    by = runner()
    assert replayed(recording, by, 4).comparison.num_steps == 5
    assert max(plan.step_id for plan in by.plans) == 4


def test_a_failed_step_is_left_out(tmp_path: Path):
    recording = record(tmp_path / "a.rec", land_errors={3: RuntimeError("once")})
    assert replayed(recording).comparison.is_equal


def test_a_step_that_fails_in_the_replay_is_told(tmp_path: Path):
    recording = record(tmp_path / "a.rec")
    by = ScriptedRunner(model=FakeKV(8, VOCABULARY), land_errors={6: RuntimeError("secret")})
    with pytest.raises(RecordingError, match=r"step 6 failed in the replay: builtins.RuntimeError"):
        replayed(recording, by)


def test_steps_that_landed_in_another_order_than_they_were_planned_are_refused(tmp_path: Path):
    recording = record(tmp_path / "a.rec")
    records = list(recording.records())
    first, second = [place for place, one in enumerate(records) if isinstance(one, Landed)][:2]
    records[first], records[second] = records[second], records[first]
    path = tmp_path / "b.rec"
    path.write_bytes(first_bytes(recording.header) + frame(pack(records, len(records))))
    with pytest.raises(RecordingError, match=r"b\.rec: step 1 landed before step 0"):
        replayed(Recording(path))


def test_a_cut_recording_is_replayed_up_to_there(tmp_path: Path):
    path = tmp_path / "a.rec"
    record(path, max_bytes=2100)
    recording = Recording(path)
    found = replayed(recording)
    assert found.comparison.is_equal
    assert "it has reached its size" in recording.ending


def test_without_prompts_nothing_can_be_checked(tmp_path: Path):
    recording = record(tmp_path / "a.rec", has_prompts=False)
    with pytest.raises(RecordingError, match="recorded without prompts"):
        check_replayable(recording, checks=True)
    check_replayable(recording, checks=False)
    assert replayed(recording).comparison.num_steps > 10


def test_an_adapter_that_was_loaded_later_is_refused(tmp_path: Path):
    recording = record(tmp_path / "a.rec")
    first = next(one for one in recording.records() if isinstance(one, Planned))
    init = msgspec.structs.replace(first.plan.inits[0], adapter=0)
    adapted = msgspec.structs.replace(first, plan=msgspec.structs.replace(first.plan, inits=(init,)))
    path = tmp_path / "b.rec"
    path.write_bytes(first_bytes(recording.header) + frame(pack([adapted], 1)))
    with pytest.raises(RecordingError, match=r"request r\d has an adapter that was loaded while the engine ran"):
        check_replayable(Recording(path), checks=True)


def test_a_step_is_shown(tmp_path: Path):
    recording = record(tmp_path / "a.rec", num_blocks=12, max_model_len=64)
    inits = {}
    shown = []
    for one in recording.records():
        if isinstance(one, Planned):
            inits |= {init.seq_id: init for init in one.plan.inits}
            shown += step_lines(one, None, inits)
    text = "\n".join(shown)
    assert "step 0 at" in text
    assert "set up row 0 for request r0 choice 0: no blocks, greedy" in text
    assert "temperature 0.5" in text
    assert "request r1 choice 1, position " in text
    assert ": 1 row, 1 token; " in text
    assert "masked" not in text


def test_a_row_that_a_mask_binds_is_shown_as_masked(tmp_path: Path):
    first = next(one for one in record(tmp_path / "a.rec").records() if isinstance(one, Planned))
    init = msgspec.structs.replace(first.plan.inits[0], has_mask=True)
    masked = msgspec.structs.replace(first, plan=msgspec.structs.replace(first.plan, inits=(init,)))
    assert sum("masked" in line for line in step_lines(masked, None, {init.seq_id: init})) == 1


@pytest.mark.parametrize(("num_samples", "told"), [(1, ""), (2, ", 1 draft"), (4, ", 3 drafts")])
def test_drafts_of_a_row_are_counted(num_samples: int, told: str):
    """Each position that yields a token, but for the first."""
    piece = SeqSlice(SeqId(0), Row(0), 8, 4, (97, 98, 99, 100), num_samples=num_samples)
    [_, line] = step_lines(Planned(0.0, Plan(0, (piece,))), None, {})
    assert line == f"  row 0: ?, positions 8 to 11{told}"


def test_what_came_of_it_is_told(tmp_path: Path):
    recording = record(tmp_path / "a.rec")
    [steps, equal] = outcome_lines(replayed(recording), checked=True)
    assert "steps replayed in" in steps
    assert equal.startswith("all ")
    wrong = list(outcome_lines(replayed(recording, ScriptedRunner(model=Wrong(5, 0))), checked=True))
    assert wrong[1].startswith("the first difference: step 5, row")
    assert len(list(outcome_lines(replayed(recording), checked=False))) == 1


def test_a_forced_mask_allows_the_recorded_tokens_alone():
    mask = ForcedMask([3, 5, 7], 0, 260)
    assert masks_of(mask, ()) == [{3}]
    assert masks_of(mask, (3, 9)) == [{3}, {5}, set()]
    mask.advance([3, 5])
    assert masks_of(mask, ()) == [{7}]
    mask.advance([7])
    assert len(masks_of(mask, ())[0]) >= 260
    assert masks_of(ForcedMask([-1], 0, 260), ()) == [set()]

"""Rules of the runner that an answer seldom shows, each with the change that would break it."""

import msgspec
import numpy as np
import pytest
import torch

from aserve.core import columns
from aserve.core.ids import Row
from aserve.core.plan import RowControls, RowSampling, StepPlan
from aserve.kernels.ops import PADDING_ID
from aserve.runner import graphs as graphs_module
from aserve.runner.controls import ControlTable
from aserve.runner.device import CpuDevice
from aserve.runner.warm_up import sign_of_life
from tests.runner.recordable import TapeGraphs, recordable_runner
from tests.runner.toy import GREEDY, chunk, fed, init

pytestmark = pytest.mark.torch

PENALTY = RowControls(columns.NO_PENALTY._replace(presence_penalty=1.0), prompt_ids=(3,), output_ids=(4, 4, 5))
BIAS = RowControls(logit_bias=((2, 1.5),))
WORDS = RowControls(bad_words=((6, 7, 8),), output_ids=(1, 2, 3, 4))
DRAWN = RowSampling(columns.NEUTRAL._replace(temperature=0.9, seed=5))


def table_of(*controls: RowControls) -> ControlTable:
    """Of three rows and ten tokens; the controls are given to row 0, one after the other."""
    table = ControlTable(num_rows=3, vocab_size=10, torch_device=torch.device("cpu"), device=CpuDevice())
    for each in controls:
        table.set_up((init(0, sampling=msgspec.structs.replace(GREEDY, controls=each)),))
    return table


def batch_of(table: ControlTable, banned: list[list[int]] | None = None):
    """Of rows 2 and 0."""
    banned_NC = np.array(banned or [[], []], np.int64)
    return table.batch(np.array([2, 0]), banned_NC), banned_NC


def test_bans_of_a_controlled_row_are_taken_over_and_those_of_others_stay():
    """Caught: `banned_NC[places] = PADDING_ID` removed, after which both would ban."""
    found, banned_NC = batch_of(table_of(BIAS), [[5, PADDING_ID], [6, 7]])
    assert found is not None
    assert found.banned_QC is not None
    assert found.banned_QC.tolist() == [[6, 7]]
    assert banned_NC.tolist() == [[5, PADDING_ID], [PADDING_ID, PADDING_ID]]


def test_a_table_is_made_when_a_row_first_needs_it():
    """Caught: `and` for `or`, and `is not None` for `is None`, where `_set_counts` and `_set_bias` return early."""
    of_bias, of_penalty, of_words = (batch_of(table_of(each))[0] for each in (BIAS, PENALTY, WORDS))
    assert of_bias is not None
    assert of_penalty is not None
    assert of_words is not None
    made = [(each.bias_RV is not None, each.counts_RV is not None) for each in (of_bias, of_penalty, of_words)]
    assert made == [(True, False), (False, True), (False, False)]
    assert [each.bad_words is not None for each in (of_bias, of_penalty, of_words)] == [False, False, True]


def test_a_row_that_changes_hands_keeps_nothing_of_its_last_controls():
    """Caught: `or` for `and`, as above, by which the bias of the one before would go on."""
    found, _ = batch_of(table_of(BIAS, PENALTY, RowControls(bad_words=((9,),))))
    assert found is not None
    assert found.bias_RV is not None
    assert found.counts_RV is not None
    assert not found.bias_RV.any()
    assert not found.counts_RV.any()


def test_a_prompts_tokens_count_once_and_those_of_the_output_as_often_as_they_came():
    """Caught: another factor than 2, by which the two are told apart."""
    found, _ = batch_of(table_of(PENALTY))
    assert found is not None
    assert found.counts_RV is not None
    assert found.counts_RV[0].tolist() == [0, 0, 0, 1, 4, 2, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("words", "output_ids", "recent"),
    [
        (((6, 7, 8), (1,)), (1, 2, 3, 4), [3, 4]),
        (((6, 7, 8),), (4,), [PADDING_ID, 4]),
        (((6,),), (1, 2), [2]),
    ],
)
def test_the_newest_tokens_are_kept_that_the_longest_word_asks_for(words, output_ids, recent):
    """Caught: another number of tokens than the longest word has before its last, at least 1; the oldest ones."""
    found, _ = batch_of(table_of(RowControls(bad_words=words, output_ids=output_ids)))
    assert found is not None
    assert found.bad_words is not None
    assert found.bad_words.recent_RH[0].tolist() == recent


def test_rows_that_are_set_up_anew_are_sampled_in_their_new_way(monkeypatch: pytest.MonkeyPatch):
    """Caught: `_members = None` removed, by which the same rows would go on with the graph of their old way.

    And `if not inits` for `if inits`, by which how they are sampled would be looked up in every step.
    """
    looked_up = []
    how_sampled = graphs_module.DecodeGraphs._how_sampled
    monkeypatch.setattr(
        graphs_module.DecodeGraphs, "_how_sampled", lambda *args: looked_up.append(1) or how_sampled(*args)
    )

    def tokens(graphs: TapeGraphs | None) -> list[tuple[int, ...]]:
        runner = recordable_runner(graphs)
        results = []
        for sampling in (GREEDY, DRAWN, GREEDY):
            chunks = (chunk(0, 0, [1, 2, 3], *range(1, 9)), chunk(1, 0, [4], *range(9, 17)))
            inits = (init(0, sampling=sampling), init(1, sampling=sampling))
            results.append(runner.run(StepPlan(0, chunks, inits)).token_ids)
            plans = [StepPlan(1, (fed(0, 3 + k), fed(1, 1 + k))) for k in range(graphs_module.CAPTURE_AFTER + 3)]
            results += [runner.run(plan).token_ids for plan in plans]
        runner.close()
        return results

    tape = TapeGraphs()
    assert tokens(tape) == tokens(None)
    assert tape.num_replays >= 9
    assert len(looked_up) == 3


def test_a_sign_of_life_is_one_token_of_nobodys():
    """Caught: another number of tokens than it has ids, and a block of somebody's."""
    plan = sign_of_life(Row(3), num_groups=2)
    [piece], [start] = plan.slices, plan.inits
    assert (piece.row, piece.start, piece.num_tokens, piece.token_ids) == (3, 0, 1, (0,))
    assert (start.row, start.block_ids) == (3, (0, 0))

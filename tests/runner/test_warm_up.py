"""What start-up runs: that it runs anywhere, and that on a GPU nothing is left to compile for the requests after it."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from aserve.runner.warm_up import GREEDY, one_slice, warm_up_plans
from tests.runner.toy import VOCAB_SIZE, toy_runner

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("max_model_len", [1, 2, 3, 9, 64])
@pytest.mark.parametrize("compiles", [False, True])
def test_every_step_runs_on_the_null_block_and_stays_within_the_context(max_model_len, compiles):
    plans = list(warm_up_plans(max_model_len, 4, VOCAB_SIZE, max_num_seqs=8, compiles=compiles, can_swap=True))
    runner = toy_runner(num_blocks=1, num_host_blocks=1, max_num_seqs=8)
    if compiles:
        moves = plans.pop()
        assert runner.run(moves).token_ids == ()
        assert {block for pairs in (moves.block_ops.copies, moves.block_ops.swap_ins) for _, block in pairs} == {0}
    for plan in plans:
        assert all(piece.start + piece.num_tokens <= max_model_len for piece in plan.slices)
        assert {block for row in plan.inits for block in row.block_ids} == {0}
        assert len(runner.run(plan).token_ids) == len(plan.slices) == len(plan.inits)
    runner.close()


def test_without_a_compiler_two_steps_are_enough():
    assert len(list(warm_up_plans(4096, 16, 40, max_num_seqs=9, compiles=False))) == 2


def test_with_a_compiler_lengths_double_up_to_the_longest():
    plans = list(warm_up_plans(5000, 16, 40, max_num_seqs=1, compiles=True))
    contexts = [p.slices[0].start + 1 for p in plans if p.slices and p.slices[0].num_tokens == 1 and p.slices[0].start]
    assert contexts[-1] == 5000
    assert all(after <= 2 * before for before, after in pairwise(contexts))


def test_with_a_compiler_each_way_to_sample_comes_with_banned_ids_and_without():
    plans = warm_up_plans(5000, 16, 40, max_num_seqs=1, compiles=True)
    ways = [init.sampling for plan in plans for init in plan.inits if not plan.slices[0].start]
    for way in ways:
        is_banning = bool(way.banned_ids)
        assert any(other.columns == way.columns and bool(other.banned_ids) != is_banning for other in ways)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 20, 256])
def test_with_a_compiler_crowds_grow_by_a_third_up_to_the_largest(max_num_seqs):
    """Catches a GPU's number of programs, and a third more, between which no step of start-up has as many."""
    plans = warm_up_plans(5000, 16, 40, max_num_seqs=max_num_seqs, compiles=True)
    crowds = sorted({len(plan.slices) for plan in plans if plan.slices})
    assert (crowds[0], crowds[-1]) == (1, max_num_seqs)
    assert all(after == before + 1 or after <= before * 4 / 3 for before, after in pairwise(crowds))
    for num_programs in range(4, max_num_seqs):
        assert (
            any(num_programs < crowd <= num_programs * 4 / 3 for crowd in crowds)
            or num_programs * 4 // 3 > max_num_seqs
        )


@pytest.mark.thorough
def test_no_kernel_is_compiled_after_start_up(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.runner.offline_warm_up"]
    child = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env={**env, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    compiled = json.loads(child.stdout)
    assert len(compiled["warm_up"]) == 19
    assert {name: n for name, n in compiled["later"].items() if n} == {}


def test_a_single_token_is_the_rows_last_and_more_are_given():
    for num_tokens, given in [(1, ()), (2, (0, 0))]:
        (piece,) = one_slice(3, num_tokens, GREEDY, block_size=2).slices
        assert (piece.num_tokens, piece.token_ids) == (num_tokens, given)

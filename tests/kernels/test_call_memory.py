"""Memory of captured calls: as many rows as a step has, in as little room as what is needed at once."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from aserve.kernels.native.call_memory import LINE, CallMemory, Made, Places, UnrepeatableError
from aserve.kernels.native.call_table import CallTable
from aserve.kernels.native.native_ops import NativeOps
from tests.kernels.cases import native_ops

pytestmark = pytest.mark.torch

NORM, GATED, ROWS = Places(6, 4), Places(2, 1), Places(0, 3)
WIDTH = 40
"""Numbers of a row, which are no whole lines."""
WEIGHT_E = torch.full((WIDTH,), 0.5)


@pytest.fixture
def ops() -> NativeOps:
    return native_ops()


def of_rows(x: Tensor, kind: int | None = 0) -> Made:
    return Made(x, kind, len(x))


def chain(ops: NativeOps, x_TE: Tensor, length: int) -> tuple[CallTable, list[Tensor]]:
    """Norms of norms."""
    made = [x_TE]
    with ops.library.observed() as seen:
        for _ in range(length):
            made.append(ops.rms_norm(made[-1], WEIGHT_E, 1e-6))
    return CallTable(ops.library, seen), made[1:]


def test_a_chain_takes_two_slots_and_computes_any_number_of_rows(ops):
    """Catches sizes of the last step, and results on top of what they are made of."""
    capacity_TE = torch.randn(200, WIDTH)
    table, made = chain(ops, capacity_TE[:3], 5)
    memory = CallMemory(table, [NORM] * 5, [of_rows(x) for x in made], made[-1:])
    assert memory.num_bytes([7]) == 2 * 7 * WIDTH * 4
    for num_rows in (3, 200, 1, 0, 64):
        [result_TE] = memory.resize([num_rows])
        table.call()
        expected_TE = capacity_TE[:num_rows]
        for _ in range(5):
            expected_TE = ops.rms_norm(expected_TE, WEIGHT_E, 1e-6)
        assert torch.equal(result_TE, expected_TE)
        assert result_TE.data_ptr() % LINE == 0


def test_what_is_read_later_keeps_its_slot_and_what_is_kept_keeps_it_to_the_end(ops):
    x_TE = torch.randn(3, WIDTH)
    with ops.library.observed() as seen:
        a_TE = ops.rms_norm(x_TE, WEIGHT_E, 1e-6)
        b_TE = ops.rms_norm(a_TE, WEIGHT_E, 1e-6)
        c_TE, total_TE = ops.add_rms_norm(b_TE, a_TE, WEIGHT_E, 1e-6)
        d_TE = ops.rms_norm(c_TE, WEIGHT_E, 1e-6)
    expected = [a_TE.clone(), total_TE.clone(), d_TE.clone()]
    table, made = CallTable(ops.library, seen), [of_rows(x) for x in (a_TE, b_TE, c_TE, total_TE, d_TE)]
    memory = CallMemory(table, [NORM] * 4, made, (a_TE, total_TE, d_TE))
    assert memory.num_bytes([1]) == 4 * WIDTH * 4, "d lies where b was"
    results = memory.resize([3])
    table.call()
    for result, expected_TE in zip(results, expected, strict=True):
        assert torch.equal(result, expected_TE)


def test_rows_of_several_kinds_have_slots_of_their_own(ops):
    """Tokens, and those that are taken of them; a place within a row stays there."""
    x_TE, ids_N = torch.randn(50, WIDTH), torch.tensor([2, 0, 40, 7])
    with ops.library.observed() as seen:
        a_TE = ops.rms_norm(x_TE[:3], WEIGHT_E, 1e-6)
        taken_NE = torch.empty(2, WIDTH)
        kernel, arguments = ops.moves.rows_call(a_TE, ids_N[:2], taken_NE)
        kernel(*arguments)
        half_NE = ops.silu_and_mul(taken_NE)
    table = CallTable(ops.library, seen)
    made = [of_rows(a_TE), of_rows(taken_NE, 1), of_rows(half_NE, 1)]
    memory = CallMemory(table, [NORM, ROWS, GATED], made, [half_NE])
    for sizes in ([50, 4], [8, 2], [50, 3]):
        [result_NE] = memory.resize(sizes)
        table.call()
        normed_TE = ops.rms_norm(x_TE[: sizes[0]], WEIGHT_E, 1e-6)
        assert torch.equal(result_NE, ops.silu_and_mul(normed_TE[ids_N[: sizes[1]]]))


def elsewhere(made: Sequence[Tensor]) -> list[Made]:
    return [of_rows(x) for x in made[:-1]]


def of_no_kind(made: Sequence[Tensor]) -> list[Made]:
    return [of_rows(made[0], None), *map(of_rows, made[1:])]


def of_other_rows(made: Sequence[Tensor]) -> list[Made]:
    """Of which the kernel computes one and a half for each."""
    return [Made(made[0], 0, 2), *map(of_rows, made[1:])]


@pytest.mark.parametrize("spoil", [elsewhere, of_no_kind, of_other_rows])
def test_calls_that_cannot_be_resized_are_told(ops, spoil: Callable[[Sequence[Tensor]], list[Made]]):
    table, made = chain(ops, torch.randn(3, WIDTH), 2)
    with pytest.raises(UnrepeatableError):
        CallMemory(table, [NORM] * 2, spoil(made), made[:1])


def test_what_a_call_learns_otherwise_is_left_alone(ops):
    table, made = chain(ops, torch.randn(3, WIDTH), 2)
    before = table.words_CW.copy()
    memory = CallMemory(table, [Places(None, 4, frozenset({0}))] * 2, [of_rows(x) for x in made], made[-1:])
    memory.resize([9])
    assert (table.words_CW[:, 1 + 6] == 3).all()
    assert table.words_CW[1, 1] == before[1, 1]
    assert (table.words_CW[:, 1 + 4] != before[:, 1 + 4]).all()

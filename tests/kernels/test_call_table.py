"""Calls that are written down: all of them are made, each with what it was written down with."""

import ctypes

import pytest
import torch

from aserve.kernels.native.call_table import CallTable
from tests.kernels.cases import native_ops

pytestmark = pytest.mark.torch


@pytest.fixture
def ops():
    return native_ops()


def one_by_one(table):
    assert [kernel.name for kernel in table.one_by_one()] == ["rms_norm_f32", "rope_and_write_kv_f32"]


@pytest.mark.parametrize("call", [CallTable.call, one_by_one])
def test_a_call_behind_another_finds_what_that_has_written(ops, call):
    """rope_and_write_kv takes as many addresses as a call has room for, rms_norm a float behind them."""
    x_TE, weight_E = torch.randn(3, 32), torch.rand(32)
    turns_LD, positions_T, slots_T = torch.randn(16, 8), torch.tensor([4, 0, 15]), torch.tensor([5, 3, 0])
    k_cache_BPKD, v_cache_BPKD = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
    with ops.library.observed() as seen:
        norm_TE = ops.rms_norm(x_TE, weight_E, 0.25)
        q_THD, k_TKD, v_TKD = norm_TE.view(3, 4, 8).split((2, 1, 1), 1)
        cache = (turns_LD, positions_T, k_cache_BPKD, v_cache_BPKD, slots_T)
        out_THD = ops.rope_and_write_kv(q_THD, k_TKD, v_TKD, *cache)
    written = (norm_TE, out_THD, k_cache_BPKD, v_cache_BPKD)
    expected = [x.clone() for x in written]
    table = CallTable(ops.library, seen)
    for x in written:
        x.fill_(7.0)
    for cache_BPKD in (k_cache_BPKD, v_cache_BPKD):
        cache_BPKD.view(-1, 8)[[1, 2, 4, 6, 7]] = 0.0
    call(table)
    for x, expected_x in zip(written, expected, strict=True):
        assert torch.equal(x, expected_x)


def test_what_is_changed_is_what_calls_take_from_then_on(ops):
    x_TE, weight_E = torch.randn(2, 8), torch.ones(8)
    with ops.library.observed() as seen:
        first_TE, second_TE = ops.rms_norm(x_TE, weight_E, 0.0), ops.rms_norm(x_TE, weight_E, 0.0)
    expected_TE = first_TE.clone()
    table = CallTable(ops.library, seen)
    other_TE = torch.zeros(2, 8)
    for out_TE in (first_TE, second_TE):
        out_TE.zero_()
    table.change([0], 4, other_TE.data_ptr())
    table.call()
    assert torch.equal(other_TE, expected_TE)
    assert torch.equal(second_TE, expected_TE)
    assert not first_TE.any()
    table.change([0, 1], 6, 1)  # rows
    for out_TE in (second_TE, other_TE):
        out_TE.zero_()
    table.call()
    for out_TE in (second_TE, other_TE):
        assert torch.equal(out_TE[0], expected_TE[0])
        assert not out_TE[1].any()


@pytest.mark.parametrize(("types", "given"), [([ctypes.c_int64] * 13, [0] * 13), ([ctypes.c_float] * 3, [0.0] * 3)])
def test_a_kernel_that_takes_more_than_a_call_has_room_for_is_refused(ops, types, given):
    kernel = ops.library.function("move_blocks", types)
    with pytest.raises(AssertionError):
        CallTable(ops.library, [(kernel, given)])

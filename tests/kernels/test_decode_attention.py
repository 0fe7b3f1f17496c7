import pytest

from aserve.kernels.decode_attention import choose_num_splits
from aserve.kernels.reference import ReferenceOps
from aserve.kernels.triton_ops import TritonOps
from tests.kernels.cases import Fast, paged

pytestmark = pytest.mark.torch


def test_splits_fill_the_device_and_are_never_tiny() -> None:
    """132 processors, 4 programs each."""
    assert choose_num_splits(num_programs=8, num_tiles=256, num_sms=132) == 64
    assert choose_num_splits(num_programs=8, num_tiles=16, num_sms=132) == 8
    assert choose_num_splits(num_programs=256, num_tiles=256, num_sms=132) == 2
    assert choose_num_splits(num_programs=2048, num_tiles=256, num_sms=132) == 1
    assert choose_num_splits(num_programs=1, num_tiles=1, num_sms=132) == 1


def test_more_sequences_never_cost_a_cliff_of_programs() -> None:
    """From 8 sequences of 4096 tokens and 8 key heads on, every processor has two programs at least."""
    programs = [n * choose_num_splits(n, num_tiles=64, num_sms=132) for n in range(8, 8 * 257, 8)]
    assert min(programs[7:]) >= 132 * 2


@pytest.mark.parametrize("num_sms", [1, 2, 8, 64])
def test_the_number_of_splits_does_not_change_the_result(triton_fast: Fast, num_sms: int) -> None:
    case = paged(triton_fast, [500, 3, 130], [1, 1, 1])
    triton_fast.assert_close(case.attend(TritonOps(num_sms)), case.attend(ReferenceOps()))


@pytest.mark.parametrize("num_sms", [1, 64])
def test_a_padding_row_without_context_gives_zeros(triton_fast: Fast, num_sms: int) -> None:
    case = paged(triton_fast, [300, 20], [1, 1])
    case.batch.seq_lens_S[1] = 0
    assert not case.attend(TritonOps(num_sms))[1].any()


@pytest.mark.parametrize("head_dim", [16, 80])
def test_a_group_that_overflows_sixteen_rows(triton_fast: Fast, head_dim: int) -> None:
    case = paged(triton_fast, [70, 5], [1, 3], heads=(40, 2), head_dim=head_dim)
    triton_fast.assert_close(case.attend(triton_fast.ops), case.attend(ReferenceOps()))

"""Triton's interpreter as the tests of kernels have it: quick, and of the same mind."""

import pytest

from tests.kernels.cases import Fast
from tests.kernels.conftest import HAS_CUDA
from tests.kernels.interpreter import looked_up_once, patched_once

pytestmark = [pytest.mark.torch, pytest.mark.skipif(HAS_CUDA, reason="kernels are compiled here")]


def test_the_interpreter_that_is_installed_is_one_that_can_be_made_quick(triton_fast: Fast) -> None:
    """Of another version of Triton the tests pass, too, but take twice as long, and nobody would see why."""
    from triton.runtime import interpreter

    assert interpreter.is_quick
    assert not interpreter.interpreter_builder.options.debug, "overflows are looked for again"


def test_a_type_of_numpy_is_the_same_as_before_for_numbers_blocks_and_pointers(triton_fast: Fast) -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    look_up = interpreter._get_np_dtype.__closure__
    slow = next(cell.cell_contents for cell in look_up if callable(cell.cell_contents))
    quick = looked_up_once(slow)
    kinds = [tl.int1, tl.int8, tl.uint16, tl.int32, tl.uint64, tl.float16, tl.bfloat16, tl.float32, tl.float64]
    for kind in kinds:
        pointer = tl.pointer_type(kind)
        for form in (kind, pointer, tl.block_type(kind, [4, 8]), tl.block_type(pointer, [4])):
            assert quick(form) == slow(form) == quick(form), form
    with pytest.raises(KeyError):
        quick(tl.void)


def test_each_module_is_patched_once_and_is_not_restored() -> None:
    patched = []
    patch = patched_once(patched.append, list)
    for fn in (patched_once, looked_up_once, pytest.raises, patched_once):
        assert patch(fn) == []
    assert patched == [patched_once, pytest.raises]

"""A remembered launch runs what Triton itself would run, with the same arguments: by Triton's own choice of kernels.

Kernels are chosen by a real JITFunction for sm_90; only what compiles and what runs is a fake.
"""

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.compiler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from no_device import NoDevice
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from aserve.kernels import launch
from aserve.kernels.launch import Launch

pytestmark = pytest.mark.torch


def scale_kernel(x_ptr, bias_ptr, ids_ptr, out_ptr, stride, length, factor, WIDTH, BLOCK=64):
    pass


scale_kernel.__annotations__ = {"WIDTH": "tl.constexpr", "BLOCK": "tl.constexpr"}
ANY_LENGTH = {"do_not_specialize": ["length"], "do_not_specialize_on_alignment": ["ids_ptr"]}


class Compiled:
    """As much of a compiled kernel as a launch uses. Notes each run, as (kernel, grid, stream, arguments)."""

    def __init__(self, runs: list[tuple[Any, ...]], signature: object, attributes: object) -> None:
        self.kind = (str(signature), str(attributes))
        self.function, self.packed_metadata = object(), object()
        self._runs = runs

    def launch_metadata(self, *launch: object) -> None:
        return None

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter_hook, exit_hook, *arguments):
        assert function is self.function
        assert metadata is self.packed_metadata
        plain = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        self._runs.append((self, (x, y, z), stream, plain))


class Gpus(NoDevice):
    """Several, with a stream each."""

    current = 0

    def get_current_device(self) -> int:
        return self.current

    def get_current_stream(self, device: int) -> int:
        return 100 + device


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    noted: list[tuple[Any, ...]] = []
    monkeypatch.setattr(driver, "_active", Gpus())
    monkeypatch.setattr(triton.compiler, "compile", lambda src, **options: Compiled(noted, src.signature, src.attrs))
    return noted


@pytest.fixture
def kernel(runs: list[tuple[Any, ...]]) -> JITFunction:
    return JITFunction(scale_kernel, **ANY_LENGTH)


def forbid_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: JITFunction, *args: object, **kwargs: object) -> None:
        raise AssertionError("not remembered")

    monkeypatch.setattr(JITFunction, "run", run)


STORE = torch.zeros(64, dtype=torch.int64)
DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.int64)
TENSORS = st.builds(lambda dtype, start: STORE.view(dtype)[start:], st.sampled_from(DTYPES), st.integers(0, 4))
SIZES = st.sampled_from([1, 2, 8, 16, 17, 32, 2**31 - 1, 2**31, 2**31 + 16])
NUMBERS = st.tuples(SIZES, SIZES, st.sampled_from([0.5, 1.0]))
LAUNCHES = st.lists(st.tuples(st.tuples(TENSORS, st.none() | TENSORS, TENSORS, TENSORS), st.integers(0, 1)), min_size=1)


@given(NUMBERS, LAUNCHES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_what_runs_is_what_triton_would_run(runs, kernel, numbers, launches) -> None:
    """A key that missed an alignment, a type, a None or the device would run a kernel made for another."""
    launched = Launch(kernel, (3, 7), numbers, WIDTH=16, BLOCK=32, num_warps=8)
    for tensors, device in launches * 2:
        driver.active.current = device
        launched(*tensors)
        launched.launch_by_triton(tensors)
        assert runs[-2] == runs[-1]


def aligned_and_not() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.zeros(64)
    return x, x[1:]


def test_the_second_launch_does_without_triton(runs, kernel, monkeypatch) -> None:
    launched = Launch(kernel, (3,), (16, 5, 0.5), WIDTH=16, BLOCK=32)
    x, _ = aligned_and_not()
    launched(x, None, x, x)
    forbid_triton(monkeypatch)
    launched(x, None, x, x)
    (kernel1, *rest1), (kernel2, *rest2) = runs
    assert kernel2 is kernel1
    assert rest2 == rest1
    assert rest1 == [(3, 1, 1), 100, [x.data_ptr(), None, x.data_ptr(), x.data_ptr(), 16, 5, 0.5, 16, 32]]


def test_an_unaligned_tensor_has_a_kernel_of_its_own(runs, kernel) -> None:
    """Vector loads from an address that is no multiple of 16 bytes would fault. ids_ptr is exempt: read one by one."""
    launched = Launch(kernel, (3,), (16, 5, 0.5), WIDTH=16, BLOCK=32)
    x, unaligned = aligned_and_not()
    for _ in range(2):
        launched(x, None, x, x)
        launched(unaligned, None, x, x)
        launched(x, None, unaligned, x)
    first, second = (run[0] for run in runs[:2])
    assert first.kind != second.kind
    assert [run[0] for run in runs] == [first, second, first] * 2


@pytest.mark.parametrize(("length", "other"), [(16, 17), (16, 1), (2, 2**31)])
def test_a_size_that_changes_what_triton_specializes_on_changes_the_kernel(runs, kernel, length, other) -> None:
    x, _ = aligned_and_not()
    for stride in (length, other, length):
        Launch(kernel, (3,), (stride, 5, 0.5), WIDTH=16, BLOCK=32)(x, None, x, x)
    first, second, third = (run[0] for run in runs)
    assert first is third
    assert first.kind != second.kind


def waiting_kernel(x_ptr, OVERLAPS):
    pass


waiting_kernel.__annotations__ = {"OVERLAPS": "tl.constexpr"}


@pytest.mark.parametrize(("arch", "overlaps"), [(80, False), (89, False), (90, True), (100, True)])
def test_a_launch_overlaps_the_one_before_where_the_device_can(monkeypatch, arch: int, overlaps: bool) -> None:
    """From Hopper on: what starts early and what waits go together, or a kernel would read what is not there yet."""
    compiled: list[tuple[Any, Any]] = []

    def compile_(src: Any, **given: Any) -> Compiled:
        compiled.append((src.constants, given["options"]))
        return Compiled([], src.signature, src.attrs)

    monkeypatch.setattr(driver, "_active", Gpus(arch))
    monkeypatch.setattr(triton.compiler, "compile", compile_)
    x, _ = aligned_and_not()
    Launch(JITFunction(waiting_kernel), (3,), overlaps=True)(x)
    [(constants, options)] = compiled
    assert list(constants.values()) == [overlaps]
    assert options.get("launch_pdl", False) == overlaps


def test_a_version_that_is_not_known_launches_by_triton_and_says_so_once(runs, kernel, monkeypatch, caplog) -> None:
    monkeypatch.setattr(launch, "triton", SimpleNamespace(__version__="3.99.0"))
    launch.is_known_version.cache_clear()
    x, _ = aligned_and_not()
    calls: list[int] = []
    ordinary: Callable[..., Any] = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kwargs: (calls.append(1), ordinary(*args, **kwargs))[1])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            launched = Launch(kernel, (3,), (16, 5, 0.5), WIDTH=16, BLOCK=32)
            launched(x, None, x, x)
            launched(x, None, x, x)
    assert len(calls) == len(runs) == 4
    assert [record.getMessage() for record in caplog.records if "3.99.0" in record.getMessage()] == [
        "Triton 3.99.0 is not among ('3.6', '3.7'): launches take its own way, 15 to 50 us each"
    ]

from types import SimpleNamespace

import pytest
import torch

from aserve.core.errors import ConfigError
from aserve.kernels.cpu import CpuOps
from aserve.kernels.dispatch import select_ops

pytestmark = pytest.mark.torch


def test_a_cpu_gets_its_own_operations() -> None:
    assert isinstance(select_ops(torch.device("cpu")), CpuOps)


def test_two_engines_share_no_buffers() -> None:
    assert select_ops(torch.device("cpu")) is not select_ops(torch.device("cpu"))


def test_another_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="cpu or cuda, got meta"):
        select_ops(torch.device("meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gets_triton() -> None:
    from aserve.kernels.triton_ops import TritonOps

    assert isinstance(select_ops(torch.device("cuda")), TritonOps)


@pytest.mark.parametrize(("batch_invariant", "kind"), [(False, "TritonOps"), (True, "FixedOps")])
def test_cuda_operations_are_told_of_the_device(
    monkeypatch: pytest.MonkeyPatch, batch_invariant: bool, kind: str
) -> None:
    device = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    told = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: device)
    monkeypatch.setattr("aserve.kernels.triton_ops.TritonOps.__init__", lambda _ops, *given: told.append(given))
    ops = select_ops(torch.device("cuda"), batch_invariant=batch_invariant)
    assert (type(ops).__name__, told) == (kind, [(132, (9, 0))])


@pytest.mark.parametrize(("capability", "is_refused"), [((8, 0), True), ((8, 9), False), ((9, 0), False)])
def test_a_cache_of_float8_takes_a_device_that_converts_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_refused: bool
) -> None:
    major, minor = capability
    device = SimpleNamespace(multi_processor_count=108, major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: device)
    for wish in ("auto", "bfloat16"):
        select_ops(torch.device("cuda"), kv_cache_dtype=wish)
    if is_refused:
        with pytest.raises(ConfigError, match=r"kv_cache_dtype fp8 takes .* 8\.9 or later, this is 8\.0"):
            select_ops(torch.device("cuda"), kv_cache_dtype="fp8")
    else:
        select_ops(torch.device("cuda"), kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match="kv_cache_dtype fp8: there is none but on a GPU; choose bfloat16 on a CPU"):
        select_ops(torch.device("cpu"), kv_cache_dtype="fp8")

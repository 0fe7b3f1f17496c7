"""The way of arrays to a device: packed into one buffer, and unpacked there; CUDA's own parts run on a GPU only."""

import numpy as np
import pytest
import torch

from aserve.runner.device import CpuDevice, CudaDevice, StepDevice, pack, packed_bytes, step_device, unpack

pytestmark = pytest.mark.torch

ARRAYS = (
    np.array([1, -2, 2**40], np.int64),
    np.array([], np.int64),
    np.array([0.5], np.float32),
    np.arange(6, dtype=np.int32)[::2],
    np.array([[7, -1], [8, 9]], np.int64),
    np.empty((3, 0), np.int64),
)


def check_round_trip(tensors: list[torch.Tensor]) -> None:
    assert len(tensors) == len(ARRAYS)
    for tensor, array in zip(tensors, ARRAYS, strict=True):
        back = tensor.cpu().numpy()
        assert (back.dtype, back.shape) == (array.dtype, array.shape)
        assert np.array_equal(back, array)


def test_packed_arrays_unpack_to_themselves():
    packed = torch.empty(packed_bytes(ARRAYS), dtype=torch.uint8)
    pack(ARRAYS, packed)
    tensors = unpack(packed, ARRAYS)
    check_round_trip(tensors)
    assert all((tensor.data_ptr() - packed.data_ptr()) % 16 == 0 for tensor in tensors if tensor.numel())


def test_on_a_cpu_arrays_are_shared_and_tasks_run_at_once():
    device = step_device(torch.device("cpu"))
    assert isinstance(device, CpuDevice)
    array = np.array([1, -2, 2**40])
    [tensor] = device.upload([array])
    array[0] = 4
    landed: list[list[list[int]]] = []
    with device.stepping():
        wait = device.download([tensor])
    device.when_landed(lambda: landed.append(wait()))
    assert landed == [[[4, -2, 2**40]]]
    device.drain()
    device.release()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_a_round_trip_through_the_own_stream():
    device: StepDevice = step_device(torch.device("cuda", torch.cuda.current_device()))
    assert isinstance(device, CudaDevice)
    landed: list[list[list[int]]] = []
    with device.stepping():
        tensors = device.upload(ARRAYS)
        wait = device.download([tensors[0] * 2])
    device.when_landed(lambda: landed.append(wait()))
    device.drain()
    device.drain()
    device.release()
    assert landed == [[(ARRAYS[0] * 2).tolist()]]
    check_round_trip(tensors)

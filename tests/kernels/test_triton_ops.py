import warnings

import pytest
import torch

from aserve.kernels.triton_ops import TritonOps
from tests.kernels.cases import Fast, paged, sampling

pytestmark = [
    pytest.mark.torch,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_step_never_waits_for_the_device_and_replays_as_a_graph() -> None:
    torch.manual_seed(0)
    fast = Fast(TritonOps(num_sms=132), torch.device("cuda"), torch.bfloat16)
    case = paged(fast, [5, 900, 40], [1, 1, 30], head_dim=64)
    x, weight = fast.randn(32, 256), fast.randn(256)
    logits = fast.randn(3, 5000, dtype=torch.float32)
    batch = sampling(3, temperature=[0.0, 1.0, 0.7], top_p=0.9, top_k=50, device=fast.device)

    def run() -> list[torch.Tensor]:
        return [
            *fast.ops.add_rms_norm(x, x, weight, 1e-6),
            fast.ops.silu_and_mul(x),
            case.attend(fast.ops),
            fast.ops.sample(logits, batch),
        ]

    expected = run()  # compiles
    with warnings.catch_warnings():  # that it does not see everything
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    for replayed, eager in zip(captured, expected, strict=True):
        assert torch.equal(replayed, eager)

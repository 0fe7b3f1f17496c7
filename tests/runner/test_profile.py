"""The memory plan: its arithmetic, and the step that is measured."""

from types import SimpleNamespace

import pytest
import torch

from aserve.core.config import GiB
from aserve.core.speculation import MAX_STEP_DRAFTS
from aserve.kernels.cpu import CpuOps
from aserve.runner import host_budget, profile
from aserve.runner.graph_keys import KINDS, MAX_GRAPHS
from aserve.runner.host_budget import cpu_kv_budget
from aserve.runner.kv_store import allocate_kv
from aserve.runner.mixed_graphs import MAX_MIXED_GRAPHS
from aserve.runner.profile import (
    BYTES_PER_GRAPH,
    MARGIN_BYTES,
    cuda_kv_budget,
    graph_budget,
    kv_budget,
    largest_step,
)
from aserve.runner.runner import ModelRunner
from tests.runner.toy import ToyLM

pytestmark = pytest.mark.torch


def test_alone_on_a_gpu_the_share_limits():
    budget = kv_budget(
        total_bytes=100 * GiB, free_bytes=80 * GiB, peak_bytes=20 * GiB, step_bytes=4 * GiB, utilization=0.75
    )
    assert budget == 55 * GiB


def test_beside_other_tenants_what_is_free_limits():
    budget = kv_budget(
        total_bytes=100 * GiB, free_bytes=30 * GiB, peak_bytes=20 * GiB, step_bytes=4 * GiB, utilization=0.75
    )
    assert budget == 26 * GiB - MARGIN_BYTES


def test_graphs_that_are_captured_later_have_their_share():
    sizes = {"total_bytes": 100 * GiB, "peak_bytes": 20 * GiB, "step_bytes": 4 * GiB, "utilization": 0.75}
    for free_bytes in (30 * GiB, 80 * GiB):
        without = kv_budget(**sizes, free_bytes=free_bytes)
        assert kv_budget(**sizes, free_bytes=free_bytes, graph_bytes=GiB) == without - GiB


def test_each_graph_has_a_share_beyond_the_pool_that_all_have_together():
    one, many = (graph_budget(800 * 2**20, *sizes) - 900 * 2**20 for sizes in [(1, 2048), (256, 8192)])
    assert one == (len(KINDS) + MAX_MIXED_GRAPHS) * BYTES_PER_GRAPH
    assert many == (MAX_GRAPHS + MAX_MIXED_GRAPHS) * BYTES_PER_GRAPH


def test_a_budget_is_never_negative():
    assert kv_budget(total_bytes=GiB, free_bytes=GiB, peak_bytes=GiB, step_bytes=0, utilization=0.5) == 0


def test_a_cpu_gives_four_gibibytes_at_most():
    assert 0 < cpu_kv_budget() <= 4 * GiB


@pytest.mark.parametrize(("memory_bytes", "budget"), [(2 * GiB, GiB // 2), (16 * GiB, 4 * GiB), (64 * GiB, 4 * GiB)])
def test_a_cpu_with_less_memory_gives_a_quarter_of_it(monkeypatch, memory_bytes, budget):
    monkeypatch.setattr(host_budget, "host_memory_bytes", lambda: memory_bytes)
    assert cpu_kv_budget() == budget


@pytest.fixture
def fake_counters(monkeypatch):
    """Make the counters those of a GPU that has so much free; steps run on the CPU all the same."""

    def make(free_bytes):
        counters = {
            "reset_peak_memory_stats": None,
            "memory_allocated": 20 * GiB,
            "max_memory_allocated": 24 * GiB,
            "mem_get_info": (free_bytes, 100 * GiB),
        }
        for name, value in counters.items():
            monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)

    return make


def toy_budget(captured_len):
    return cuda_kv_budget(
        ToyLM(),
        CpuOps(),
        largest_step(4, 50, 64, block_size=4),
        cache_dtype=torch.float32,
        device=torch.device("cpu"),
        block_size=4,
        gpu_memory_utilization=0.75,
        captured_len=captured_len,
    )


@pytest.mark.parametrize(
    ("free_bytes", "expected"), [(80 * GiB, 75 * GiB - 24 * GiB), (50 * GiB, 50 * GiB - 4 * GiB - MARGIN_BYTES)]
)
def test_steps_that_become_no_graphs_are_measured_too(fake_counters, free_bytes, expected):
    fake_counters(free_bytes)
    assert toy_budget(captured_len=None) == expected


def test_room_is_left_for_graphs_only_where_steps_become_graphs(fake_counters, monkeypatch):
    fake_counters(80 * GiB)
    captured = []
    monkeypatch.setattr(profile, "graph_device", lambda device: SimpleNamespace(num_bytes=GiB))
    monkeypatch.setattr(ModelRunner, "capture_largest", lambda self: captured.append(self))
    budgets = [toy_budget(captured_len=captured_len) for captured_len in (None, 64)]
    assert len(captured) == 1
    assert budgets[0] - budgets[1] == graph_budget(GiB, 4, 64)


@pytest.mark.parametrize(("max_num_seqs", "num_tokens", "max_model_len"), [(4, 50, 64), (8, 5, 64), (2, 100, 16)])
def test_the_largest_step_fills_the_budget_and_runs_on_the_null_block_alone(max_num_seqs, num_tokens, max_model_len):
    plan = largest_step(max_num_seqs, num_tokens, max_model_len, block_size=4)
    longest = plan.slices[0].num_tokens
    assert len(plan.slices) == min(max_num_seqs, num_tokens)
    assert longest == min(-(-num_tokens // len(plan.slices)), max_model_len)
    kv = allocate_kv(ToyLM.spec, num_blocks=1, block_size=4, dtype=torch.float32, device=torch.device("cpu"))
    runner = ModelRunner(ToyLM(), CpuOps(), kv, max_num_seqs=max_num_seqs, max_model_len=longest)
    assert len(runner.run(plan).token_ids) == len(plan.slices)
    runner.close()


def test_the_largest_step_samples_at_as_many_drafts_as_a_step_may_have():
    """Catches drafts whose logits nobody left memory for."""
    plan = largest_step(100, 1000, 64, block_size=4, num_drafts=5)
    num_drafts = sum(piece.num_samples - 1 for piece in plan.slices)
    assert MAX_STEP_DRAFTS <= num_drafts < MAX_STEP_DRAFTS + 5
    few = largest_step(2, 8, 64, block_size=4, num_drafts=5)
    assert [len(piece.draft_ids) for piece in few.slices] == [3, 3], "a draft is one of the step's tokens"

"""Behind the last layer's keys and values a model computes those tokens alone whose hidden states are read."""

from dataclasses import replace
from typing import cast

import pytest
import torch

from aserve.kernels.cpu import CpuOps
from aserve.kernels.ops import LoraBatch
from aserve.models.layers import DenseMethod
from aserve.models.llama import GatedMLP, Llama
from aserve.models.rope import rope_table
from aserve.models.spec import read_spec
from aserve.models.weights import RandomWeights
from aserve.runner.batch import PromptTargets, StepBatch
from aserve.runner.step import wanted
from tests.checkpoints import SHAPE
from tests.models.paged import PagedSequences

pytestmark = pytest.mark.torch

CHUNKS = [[(0, [1, 2, 3, 4, 5]), (1, [9])], [(0, [6]), (1, [7, 8])], [(0, [3]), (1, [4])]]


@pytest.fixture
def model(monkeypatch):
    """A Llama, and how many rows each of its feed-forward blocks was given, call by call."""
    num_rows: list[int] = []
    whole = GatedMLP.__call__

    def counted(self, x_TE, batch):
        num_rows.append(len(x_TE))
        return whole(self, x_TE, batch)

    monkeypatch.setattr(GatedMLP, "__call__", counted)
    spec = read_spec({"architectures": ["LlamaForCausalLM"], **SHAPE})
    assert spec.rope is not None
    cpu = torch.device("cpu")
    cos_sin_LD = rope_table(spec.rope, spec.head_dim, 64, cpu)
    return Llama(spec, CpuOps(), RandomWeights(torch.float32, cpu, 0), DenseMethod(), cos_sin_LD), num_rows


def run(model, wanted):
    """The hidden states of three steps, of the tokens that are wanted, and the cache behind them."""
    torch.manual_seed(0)  # what the cache is full of
    sequences = PagedSequences(model, 2, max_len=64)
    hidden = [sequences.forward(chunk, wanted) for chunk in CHUNKS]
    return hidden, sequences.kv


@pytest.mark.parametrize("rows", [[0], [1], [0, 1], []])
def test_wanted_tokens_are_as_ever_and_so_is_the_cache(model, rows: list[int]):
    llama, num_rows = model
    whole, kv = run(llama, None)
    del num_rows[:]
    part, same_kv = run(llama, rows)
    for all_TE, some_TE in zip(whole, part, strict=True):
        torch.testing.assert_close(some_TE, all_TE[rows])
    for before, after in zip(kv, same_kv, strict=True):
        assert torch.equal(before.k_BPKD, after.k_BPKD)
        assert torch.equal(before.v_BPKD, after.v_BPKD)
    num_layers = llama.spec.num_layers
    first = num_rows[: num_layers if rows else num_layers - 1]
    assert first == [6] * (num_layers - 1) + [len(rows)] * bool(rows)


def batch(num_tokens: int, *sampled: int) -> StepBatch:
    """What `wanted` looks at, and nothing else."""
    tokens_T, none = torch.zeros(num_tokens, dtype=torch.int64), cast("torch.Tensor", None)
    sampled_N = torch.tensor(sampled, dtype=torch.int64)
    return StepBatch(tokens_T, tokens_T, none, sampled_N, sampled_N, none)  # type: ignore[arg-type]


def test_a_step_wants_what_it_samples_but_all_where_all_is_read():
    some = batch(7, 2, 6)
    assert torch.equal(cast("torch.Tensor", wanted(some)), some.sampled_tokens_N)
    nothing = wanted(batch(7))
    assert nothing is not None
    assert len(nothing) == 0
    assert wanted(batch(2, 0, 1)) is None
    assert wanted(replace(some, prompt_targets=cast("PromptTargets", object()))) is None
    assert wanted(replace(some, lora=cast("LoraBatch", object()))) is None

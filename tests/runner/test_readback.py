"""What a step's outputs are on the host."""

from array import array

import pytest
import torch

from aserve.core.ids import Row, SeqId
from aserve.core.plan import SeqSlice, StepPlan
from aserve.runner.device import step_device
from aserve.runner.readback import Readback
from aserve.runner.step import StepOutput

pytestmark = pytest.mark.torch


def test_vectors_of_each_token_take_the_place_of_a_sequences_own():
    pieces = tuple(SeqSlice(SeqId(i), Row(i), 0, 2, (5, 6), num_samples=1) for i in range(3))
    of_tokens = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    output = StepOutput(
        ids_N=torch.tensor([0, 0, 0]),
        scores=(),
        prompt_scores=None,
        vectors_NO=torch.tensor([[7.0, 7.5], [8.0, 8.5], [9.0, 9.5]]),
        token_vectors={1: of_tokens},
    )
    result = Readback(StepPlan(4, pieces, ()), None, output, step_device(torch.device("cpu"))).result()
    assert result.vectors == (array("f", [7.0, 7.5]), array("f", [1.0, 2.0, 3.0, 4.0]), array("f", [9.0, 9.5]))

"""What weights will take, as far as it depends on who computes the model; see also tests/cli/test_doctor.py."""

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from aserve.core.config import Options
from aserve.models.checkpoint import Checkpoint
from aserve.models.inspection import HEAD
from aserve.weight_plan import plan_weights
from tests.runner.toy import ToyLM

TABLE_NAME = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("architecture", "is_tied", "num_tensors"),
    [
        ("LlamaForCausalLM", True, 1),
        ("LlamaForCausalLM", False, 2),
        ("ComputedByTransformers", True, 2),
    ],
)
def test_a_head_in_the_files_is_left_out_where_the_table_is_the_head(tmp_path, architecture, is_tied, num_tensors):
    """Catches a head that is counted and not loaded, and one that is loaded and not counted."""
    file = tmp_path / "model.safetensors"
    save_file({name: np.zeros((8, 4), np.float32) for name in (TABLE_NAME, HEAD)}, file)
    checkpoint = Checkpoint(tmp_path, {}, {}, (file,), has_tokenizer=False)
    spec = msgspec.structs.replace(ToyLM.spec, architecture=architecture, tie_embeddings=is_tied)
    plan = plan_weights(checkpoint, spec, Options(model=str(tmp_path)))
    assert plan.num_parameters == num_tensors * 8 * 4
    assert plan.memory_bytes == num_tensors * 8 * 4 * 4


def test_of_a_model_whose_shape_is_not_known_all_that_is_in_the_files_counts(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({name: np.zeros((8, 4), np.float32) for name in (TABLE_NAME, HEAD)}, file)
    checkpoint = Checkpoint(tmp_path, {}, {}, (file,), has_tokenizer=False)
    plan = plan_weights(checkpoint, None, Options(model=str(tmp_path)))
    assert (plan.num_parameters, plan.memory_bytes, plan.bytes_per_token) == (64, 256, 128)
    assert plan.file_bytes == file.stat().st_size

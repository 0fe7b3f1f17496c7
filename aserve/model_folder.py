"""The folder of the model that is asked for, and that its config and weights are one whole.

Finding and inspecting it loads no torch, so that a wrong folder is refused in a fraction of a second.
"""

from pathlib import Path
from typing import Final

from aserve.core.config import Options
from aserve.models.checkpoint import Checkpoint, resolve_checkpoint
from aserve.models.inspection import inspect
from aserve.models.pooling import PoolingPlan, as_pooling, read_pooling

DEMO_MODEL: Final = "demo"
DEMO_FOLDER: Final = Path(__file__).parent / "demo"


def may_be_id(model: str) -> bool:
    """Whether a model's name is to be looked up on the hub, and not in the file system."""
    is_path = model.count("/") > 1 or model.startswith((".", "~", "/")) or Path(model).exists()
    return model != DEMO_MODEL and not is_path


def find_model(options: Options) -> tuple[Checkpoint, PoolingPlan | None]:
    """The model's folder, inspected, and how its model pools; None where it generates.

    Raises `CheckpointError` for a model that cannot be found or served, `ConfigError` for a context that it has not.
    """
    folder = str(DEMO_FOLDER) if options.model == DEMO_MODEL else options.model
    checkpoint = resolve_checkpoint(
        folder, options.revision, options.download_dir, options.trust_remote_code, options.hf_overrides
    )
    plan = read_pooling(checkpoint, options.runner, options.convert)
    if plan is not None:
        checkpoint = as_pooling(checkpoint, plan)
    inspect(checkpoint, dummy=options.load_format == "dummy", max_model_len=options.max_model_len)
    return checkpoint, plan

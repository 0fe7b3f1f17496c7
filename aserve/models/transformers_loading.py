"""Models that transformers builds, from a folder alone, and not larger than it is. auto: its class that makes them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from transformers.utils import logging as transformers_logging

from aserve.core.errors import CheckpointError
from aserve.models.checkpoint import Checkpoint
from aserve.models.inspection import read_headers
from aserve.models.weights import RandomWeights, check_finite

MAX_BUFFER_BYTES: Final = 2**28
"""What a model may allocate beside weights of any size: tables of positions, masks."""


def check_size(auto: Any, config: Any, options: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Refuse a config that describes far more than the weights are, before any of it is allocated."""
    num_elements = sum(tensor.num_elements for tensor in read_headers(checkpoint).values())
    num_bytes = sum(file.stat().st_size for file in checkpoint.weight_files)
    with torch.device("meta"):
        model = auto.from_config(config, **options)
    wanted = sum(parameter.numel() for parameter in model.parameters())
    if wanted > 1.5 * num_elements:
        raise CheckpointError(
            f"{checkpoint.path}: config.json describes {wanted} parameters, but the weights are {num_elements} numbers"
        )
    buffer_bytes = sum(buffer.nbytes for buffer in model.buffers())
    if buffer_bytes > max(num_bytes, MAX_BUFFER_BYTES):
        raise CheckpointError(
            f"{checkpoint.path}: config.json makes transformers allocate {buffer_bytes} bytes beside weights of "
            f"{num_bytes}"
        )


def read_model(auto: Any, checkpoint: Checkpoint, options: Mapping[str, Any]) -> Any:
    """The checkpoint's model. Raises `CheckpointError` where its weights are not those that the config describes."""
    with _without_progress_bars():
        model, report = auto.from_pretrained(checkpoint.path, use_safetensors=True, output_loading_info=True, **options)
    for problem in ("missing_keys", "mismatched_keys"):
        if report.get(problem):
            names = ", ".join(str(key) for key in sorted(report[problem])[:3])
            raise CheckpointError(f"{checkpoint.path}: weights do not fit the config: {problem} {names}")
    for name, parameter in model.named_parameters():
        check_finite(name, parameter)
    return model


def random_model(
    auto: Any, config: Any, options: Mapping[str, Any], weights: RandomWeights, device: torch.device
) -> Any:
    """A model of that config, its weights drawn."""
    with torch.random.fork_rng():  # from_config draws from torch's global generator
        model = auto.from_config(config, **options).to(device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weights.fill(parameter, name)
    return model


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """aserve reports progress itself; transformers' bars go to standard error of whoever embeds it."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()

"""Configurations for tests of recordings and simulations."""

from aserve.core.config import EngineConfig


def config_of(**numbers: object) -> EngineConfig:
    fields = {
        "block_size": 8,
        "num_blocks": 64,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "watermark": 0.0,
        "enable_prefix_caching": True,
    }
    return EngineConfig(**fields | numbers)

"""Masks as transformers makes them, and which of them attention can stand for."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from aserve.core.errors import CheckpointError
from aserve.models.transformers_probe import LayerCall, Probe, check_calls, check_company, read_windows, rule_mask

pytestmark = pytest.mark.torch

CONTEXT_LEN = 512


def config(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(model_type="tested", **fields)


def probe(mask: Tensor | None, window: int | None = None) -> Probe:
    """What a model of one layer does."""
    call = LayerCall(layer=0, causal=True, scale=1.0, window=window, soft_cap=None, mask=mask, others={})
    return Probe(calls=[call])


def windows(rule: Callable[..., Tensor] | None, window: int | None = None, **fields: Any) -> tuple[int | None, ...]:
    mask = None if rule is None else rule_mask(q_length=1, kv_length=1, mask_function=rule, dtype=torch.float32)
    return read_windows(config(**fields), probe(None, window), probe(mask), CONTEXT_LEN)


def prefix(length: int) -> Callable[..., Tensor]:
    return or_masks(causal_mask_function, lambda batch, head, query, key: key < length)


def holes(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
    """Every second token, as a dilated window has it."""
    return (query - key) % 2 == 0


def first_token(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
    """A sink that all see."""
    return (query - key) == query


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (causal_mask_function, None),
        (sliding_window_causal_mask_function(24), 24),
        (sliding_window_causal_mask_function(1), 1),
        (sliding_window_causal_mask_function(CONTEXT_LEN - 1), CONTEXT_LEN - 1),
        (sliding_window_causal_mask_function(CONTEXT_LEN), None),
        (and_masks(sliding_window_causal_mask_function(24), causal_mask_function), 24),
    ],
)
def test_causal_windows_are_read_from_the_rule(rule, expected):
    assert windows(rule) == (expected,)
    assert windows(rule, expected) == (expected,)


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (bidirectional_mask_function, "tokens that come later"),
        (sliding_window_bidirectional_mask_function(24), "tokens that come later"),
        (prefix(10), "tokens that come later"),
        (chunked_causal_mask_function(24, torch.zeros(1, dtype=torch.int64)), "neither causal nor a sliding window"),
        (and_masks(causal_mask_function, holes), "neither causal nor a sliding window"),
        (or_masks(sliding_window_causal_mask_function(24), first_token), "neither causal nor a sliding window"),
    ],
)
def test_other_rules_are_refused(rule, reason):
    with pytest.raises(CheckpointError, match=f"tested cannot run over a paged cache: .*{reason}"):
        windows(rule)


def test_a_rule_that_depends_on_the_tokens_themselves_is_refused():
    groups = blockwise_overlay(torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises((CheckpointError, IndexError)):
        windows(or_masks(causal_mask_function, groups))


@pytest.mark.parametrize(
    ("rule", "window", "fields", "reason"),
    [
        (causal_mask_function, 24, {}, "asks attention for a window of 24, its mask has None"),
        (sliding_window_causal_mask_function(48), 24, {}, "asks attention for a window of 24, its mask has 48"),
        (causal_mask_function, None, {"sliding_window": 24}, "neither its mask nor its call has the window"),
        (None, None, {"sliding_window": 24}, "neither its mask nor its call has the window"),
        (None, None, {"sliding_window": 24, "layer_types": ["sliding_attention"]}, "neither its mask nor its call"),
        (causal_mask_function, None, {"layer_types": ["chunked_attention"]}, "layer 0 has chunked_attention"),
    ],
)
def test_a_layer_whose_mask_call_and_config_disagree_is_refused(rule, window, fields, reason):
    with pytest.raises(CheckpointError, match=reason):
        windows(rule, window, **fields)


def test_every_layer_has_a_kind():
    two = Probe(calls=probe(None).calls * 2)
    with pytest.raises(CheckpointError, match="layer_types names 1 layers, of which 2 attend"):
        read_windows(config(layer_types=["full_attention"]), two, two, CONTEXT_LEN)


@pytest.mark.parametrize("fields", [{"is_encoder_decoder": True}, {"num_kv_shared_layers": 1}], ids=str)
def test_layers_that_share_keys_and_values_are_refused(fields):
    with pytest.raises(CheckpointError, match="tested cannot run over a paged cache: its layers share keys and values"):
        check_calls(config(num_hidden_layers=1, **fields), probe(None))


def test_windows_as_long_as_the_context_are_none():
    assert windows(None, CONTEXT_LEN) == windows(None, None, sliding_window=CONTEXT_LEN) == (None,)
    assert windows(None, 24, sliding_window=24) == (24,)


def test_a_mask_that_was_worked_on_has_no_rule():
    mask = rule_mask(q_length=1, kv_length=1, mask_function=causal_mask_function)
    with pytest.raises(CheckpointError, match="makes an attention mask of its own"):
        read_windows(config(), probe(None), probe(mask.float()), CONTEXT_LEN)


def test_layers_that_mix_tokens_beside_attention_are_refused():
    embedding = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))

    def alone(token_ids: Any, _: Probe) -> Tensor:
        return embedding[list(token_ids)]

    def shifted(token_ids: Any, _: Probe) -> Tensor:
        return alone(token_ids, _) + alone(token_ids, _).roll(1, dims=0)

    check_company(config(), alone)
    with pytest.raises(CheckpointError, match="mix tokens beside attention"):
        check_company(config(), shifted)

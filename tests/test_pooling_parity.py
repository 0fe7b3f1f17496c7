"""Vectors and scores are transformers' own, within 1e-4, for every family and kind of pooling; batched as alone.

What is compared with is computed here from transformers' hidden states, one input at a time and without padding; the
engine computes all inputs at once, decoders in chunks of 32 tokens.
"""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers.models.bert.modeling_bert import BertEncoder

from aserve import AsyncEngine
from aserve.core.errors import CheckpointError
from aserve.core.pooling import PoolingParams, TokenizedInput
from aserve.models.checkpoint import resolve_checkpoint
from aserve.models.encoder import Encoder, load_encoder
from aserve.models.pooling import read_pooling
from tests.pooling_checkpoints import write_pooling

INPUTS = ((104,), tuple(range(40, 60)), tuple(range(7, 107)), tuple(range(7, 107)), (258, 105, 300))
TOLERANCE = 1e-4


class Case(NamedTuple):
    """A checkpoint, by `write_pooling`'s arguments; which hidden states are pooled; and the engine's options."""

    recipe: str
    method: str
    written: dict[str, Any]
    options: Mapping[str, Any] = MappingProxyType({})


CASES = {
    "qwen3 as its embedding models are saved": Case("qwen3", "last", {"method": "last"}),
    "qwen3 with a head, converted": Case("qwen3", "last", {"auto": "AutoModelForCausalLM"}, {"convert": "embed"}),
    "llama, mean": Case("llama", "mean", {"auto": "AutoModelForCausalLM", "method": "mean"}),
    "mistral with windows, cls": Case("mistral", "cls", {"method": "cls"}),
    "a decoder of transformers": Case("gemma2", "mean", {"auto": "AutoModelForCausalLM", "method": "mean"}),
    "bert, cls": Case("bert", "cls", {"method": "cls", "brackets": True}),
    "bert, mean and dense": Case("bert", "mean", {"method": "mean", "dense": 12, "normalizes": False}),
    "xlm-roberta, mean": Case("xlm-roberta", "mean", {"method": "mean"}),
    "modernbert, cls": Case("modernbert", "cls", {"method": "cls"}),
}
MORE_CASES = {
    "qwen2, last and dense": Case("qwen2", "last", {"method": "last", "dense": 8}),
    **{
        f"{name}, mean": Case(name, "mean", {"method": "mean"})
        for name in ("roberta", "distilbert", "electra", "mpnet")
    },
    "camembert, no modules": Case("camembert", "cls", {}),
    "bert for masked tokens": Case("bert", "cls", {"auto": "AutoModelForMaskedLM"}),
}


def hidden_states(folder: Path, token_ids: tuple[int, ...], **others: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        return model(torch.tensor([token_ids]), **others).last_hidden_state[0]


def expected(folder: Path, case: Case, token_ids: tuple[int, ...]) -> torch.Tensor:
    """What sentence-transformers makes of the hidden states."""
    hidden_TE = hidden_states(folder, token_ids)
    return headed(folder, case, {"last": hidden_TE[-1], "cls": hidden_TE[0], "mean": hidden_TE.mean(0)}[case.method])


def headed(folder: Path, case: Case, pooled: torch.Tensor) -> torch.Tensor:
    """Behind what is pooled: of one vector, or of several."""
    if (folder / "2_Dense").is_dir():
        dense = load_file(folder / "2_Dense" / "model.safetensors")
        pooled = torch.tanh(F.linear(pooled, dense["linear.weight"], dense["linear.bias"]))
    return F.normalize(pooled, dim=-1) if case.written.get("normalizes", True) else pooled


async def check(folder: Path, case: Case) -> None:
    write_pooling(folder, case.recipe, **case.written)
    options = {"max_num_batched_tokens": 32, "block_size": 8, "enforce_eager": True, **case.options}
    async with AsyncEngine(folder, **options) as engine:
        inputs = [TokenizedInput(token_ids) for token_ids in INPUTS]
        together = await engine.pool_all(inputs)
        for one, found in zip(inputs, together, strict=True):
            alone = await engine.pool(one)
            wanted = expected(folder, case, one.token_ids)
            assert torch.allclose(torch.tensor(found.values), wanted, atol=TOLERANCE), case
            assert torch.allclose(torch.tensor(found.values), torch.tensor(alone.values), atol=1e-5), case
        both = engine.pool_all(inputs, PoolingParams(per_token=True)), engine.pool_all(inputs)
        for one, found in zip(inputs, (await asyncio.gather(*both))[0], strict=True):
            wanted = headed(folder, case, hidden_states(folder, one.token_ids))
            assert found.num_vectors == len(one.token_ids)
            assert torch.allclose(torch.tensor(found.values).view_as(wanted), wanted, atol=TOLERANCE), case
        assert engine.statistics().num_used_blocks == 0


@pytest.mark.parametrize("name", CASES)
async def test_embeddings_are_those_of_transformers(name: str, tmp_path: Path):
    await check(tmp_path / "model", CASES[name])


def encoder_of(folder: Path) -> Encoder:
    checkpoint = resolve_checkpoint(str(folder))
    plan = read_pooling(checkpoint)
    assert plan is not None
    return load_encoder(checkpoint, plan, torch.float32, torch.device("cpu"), None)


@pytest.mark.parametrize(
    ("recipe", "auto", "pads"),
    [
        ("bert", "AutoModel", False),
        ("modernbert", "AutoModel", False),
        ("mpnet", "AutoModel", True),  # its attention cannot be replaced
        ("bert", "AutoModelForSequenceClassification", True),  # its head looks at the first token of a row
    ],
)
def test_nothing_is_padded_where_attention_can_tell_sequences_apart(recipe: str, auto: str, pads: bool, tmp_path: Path):
    assert encoder_of(write_pooling(tmp_path, recipe, auto)).pads is pads


def test_a_model_that_does_not_tell_its_attention_is_padded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    folder = write_pooling(tmp_path, "bert", method="mean")
    forward = BertEncoder.forward

    def keeping(self: BertEncoder, *given: Any, aserve_runs: object, **others: Any) -> Any:
        return forward(self, *given, **others)

    sequences = [(list(token_ids), None) for token_ids in INPUTS]
    with torch.inference_mode():
        wanted = encoder_of(folder)(sequences)
        with monkeypatch.context() as patched:
            patched.setattr(BertEncoder, "forward", keeping)
            padded = encoder_of(folder)
        assert padded.pads
        assert torch.allclose(padded(sequences), wanted, atol=1e-5)


def test_two_texts_are_told_apart_in_a_row_of_several(tmp_path: Path):
    """Each by the place where its own second text begins."""
    encoder = encoder_of(write_pooling(tmp_path, "bert", method="mean"))
    ids = list(range(40, 60))
    sequences = [(ids, 7), (ids, None), (ids, 1), (ids[:9], 3)]
    with torch.inference_mode():
        alone = torch.cat([encoder([sequence]) for sequence in sequences])
        assert torch.allclose(encoder(sequences), alone, atol=1e-5)
        types = torch.tensor([[0] * 7 + [1] * 13])
        wanted_E = hidden_states(tmp_path, tuple(ids), token_type_ids=types).mean(0)
    assert torch.allclose(alone[0], wanted_E, atol=TOLERANCE)
    assert not torch.allclose(alone[0], alone[1], atol=TOLERANCE)


async def test_an_encoder_of_no_two_positions_is_told(tmp_path: Path):
    write_pooling(tmp_path, "bert")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1}))
    with pytest.raises(CheckpointError, match="max_position_embeddings must be at least 2"):
        async with AsyncEngine(tmp_path, load_format="dummy"):
            pass


@pytest.mark.thorough
@pytest.mark.parametrize("name", MORE_CASES)
async def test_embeddings_of_more_families_are_those_of_transformers(name: str, tmp_path: Path):
    await check(tmp_path / "model", MORE_CASES[name])


@pytest.mark.parametrize(
    ("recipe", "num_labels", "activation"),
    [("llama", 3, "softmax"), ("bert", 2, "softmax"), ("xlm-roberta", 1, "sigmoid"), ("modernbert", 4, "softmax")],
)
async def test_classes_are_those_of_transformers(recipe: str, num_labels: int, activation: str, tmp_path: Path):
    """A head that is not loaded, or pooled at the wrong token, gives others."""
    from transformers import AutoModelForSequenceClassification

    auto = "AutoModelForSequenceClassification"
    folder = write_pooling(tmp_path / "model", recipe, auto, num_labels=num_labels, brackets=recipe == "bert")
    model = AutoModelForSequenceClassification.from_pretrained(folder, pad_token_id=1).eval()
    async with AsyncEngine(folder, max_num_batched_tokens=32) as engine:
        found = await engine.pool_all([TokenizedInput(token_ids) for token_ids in INPUTS])
        raw = await engine.classify(INPUTS[1], use_activation=False)
        assert engine.pooling.activation == activation
        for token_ids, output in zip(INPUTS, found, strict=True):
            with torch.inference_mode():
                logits = model(torch.tensor([token_ids])).logits[0]
            probabilities = logits.softmax(0) if activation == "softmax" else logits.sigmoid()
            assert torch.allclose(torch.tensor(output.values), probabilities, atol=TOLERANCE)
            if token_ids == INPUTS[1]:
                assert torch.allclose(torch.tensor(raw.values), logits, atol=TOLERANCE)


async def test_a_cross_encoder_sees_where_the_second_text_begins(tmp_path: Path):
    """Without token types the scores of a BERT are others."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    auto = "AutoModelForSequenceClassification"
    folder = write_pooling(tmp_path / "model", "bert", auto, num_labels=1, brackets=True)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = [("the question", "the answer"), ("hello", "world and the " * 9)]
    async with AsyncEngine(folder) as engine:
        scores = await asyncio.gather(*(engine.score(*pair) for pair in pairs))
        for (query, document), score in zip(pairs, scores, strict=True):
            encoded = tokenizer(query, document, return_tensors="pt", return_token_type_ids=True)
            assert encoded["token_type_ids"].any()
            with torch.inference_mode():
                assert score == pytest.approx(model(**encoded).logits.sigmoid().item(), abs=TOLERANCE)
        short = await engine.texts.encode_pairs([pairs[1]], ["document"], truncate_prompt_tokens=16)
        assert len(short[0].token_ids) == 16
        assert short[0].token_ids[-1] == 258, "the last special token stays"


@pytest.mark.parametrize("is_tied", [True, False])
async def test_a_reranker_scores_by_two_tokens(is_tied: bool, tmp_path: Path):
    """Qwen3-Reranker's score is the share of "yes" in the probabilities of "no" and "yes"; here two other tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = write_pooling(tmp_path / "model", "qwen3", "AutoModelForCausalLM", tie_word_embeddings=is_tied)
    template = tmp_path / "pairs.jinja"
    template.write_text("{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    no_id, yes_id = tokenizer.convert_tokens_to_ids(["n", "y"])
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    overrides = {"classifier_from_token": ["n", "y"]}
    async with AsyncEngine(
        folder, runner="pooling", convert="classify", hf_overrides=overrides, chat_template=template
    ) as engine:
        score = await engine.score("who", "me")
        encoded = tokenizer("<query>who\n<document>me\n", return_tensors="pt")
        with torch.inference_mode():
            logits = model(encoded["input_ids"]).logits[0, -1]
        wanted = logits[[no_id, yes_id]].softmax(0)[1].item()
        assert score == pytest.approx(wanted, abs=TOLERANCE)

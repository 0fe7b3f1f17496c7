"""What a folder says of pooling: which model pools, for what, and what is refused in one line."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aserve.core.errors import CheckpointError, ConfigError
from aserve.models.checkpoint import Checkpoint
from aserve.models.pooling import MAX_LABELS, PoolingPlan, as_pooling, base_family, read_pooling

ONE_LABEL = {"model_type": "bert", "id2label": {"0": "x"}}
REGRESSION = {"problem_type": "regression", "num_labels": 1}
SEVERAL = {"problem_type": "multi_label_classification"}
LAST = {"pooling_mode_lasttoken": True}
MODULES = [("", "Transformer"), ("1_Pooling", "Pooling")]


def checkpoint(folder: Path, architecture: str, **config: Any) -> Checkpoint:
    """Of a folder without weights."""
    return Checkpoint(folder, {"architectures": [architecture], **config}, {}, (), has_tokenizer=False)


def write_modules(folder: Path, modules: list[tuple[str, str]] = MODULES, **pooling: Any) -> None:
    entries = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {"pooling_mode_mean_tokens": True}))


def plan_of(folder: Path, architecture: str, runner: str = "auto", convert: str = "auto", **config: Any) -> PoolingPlan:
    plan = read_pooling(checkpoint(folder, architecture, **config), runner, convert)
    assert plan is not None
    return plan


def test_there_may_be_as_many_labels_as_that(tmp_path: Path):
    assert plan_of(tmp_path, "LlamaForSequenceClassification", num_labels=MAX_LABELS).pooling.size == MAX_LABELS
    with pytest.raises(CheckpointError, match=f"num_labels {MAX_LABELS + 1}; at most"):
        plan_of(tmp_path, "LlamaForSequenceClassification", num_labels=MAX_LABELS + 1)


def test_who_generates_generates(tmp_path: Path):
    for runner, convert in (("auto", "auto"), ("generate", "auto"), ("auto", "none"), ("generate", "none")):
        assert read_pooling(checkpoint(tmp_path, "LlamaForCausalLM"), runner, convert) is None


@pytest.mark.parametrize(
    ("architecture", "config", "task", "method", "activation", "size"),
    [
        ("Qwen3Model", {}, "embed", "last", "normalize", 0),
        ("BertModel", {"model_type": "bert"}, "embed", "cls", "normalize", 0),
        ("XLMRobertaForMaskedLM", {"model_type": "xlm-roberta"}, "embed", "cls", "normalize", 0),
        ("LlamaForSequenceClassification", {}, "classify", "last", "softmax", 2),
        (
            "BertForSequenceClassification",
            {"model_type": "bert", "id2label": {"0": "x"}},
            "classify",
            "cls",
            "sigmoid",
            1,
        ),
        (
            "Qwen2ForSequenceClassification",
            {"problem_type": "regression", "num_labels": 1},
            "classify",
            "last",
            "none",
            1,
        ),
        (
            "Qwen3ForSequenceClassification",
            {"problem_type": "multi_label_classification"},
            "classify",
            "last",
            "sigmoid",
            2,
        ),
        ("Qwen2RewardModel", {"num_labels": 1}, "reward", "last", "none", 1),
    ],
)
def test_an_architecture_that_pools_says_for_what(
    tmp_path: Path, architecture: str, config: dict[str, Any], task: str, method: str, activation: str, size: int
):
    pooling = plan_of(tmp_path, architecture, **config).pooling
    assert (pooling.task, pooling.method, pooling.activation, pooling.size) == (task, method, activation, size)


def test_modules_make_a_decoder_pool(tmp_path: Path):
    write_modules(tmp_path)
    plan = plan_of(tmp_path, "Qwen3ForCausalLM", is_matryoshka=True)
    assert (plan.pooling.method, plan.pooling.activation, plan.pooling.dimensions) == ("mean", "none", ())
    assert plan.family == "Qwen3ForCausalLM"
    assert read_pooling(checkpoint(tmp_path, "Qwen3ForCausalLM"), "generate") is None
    own = as_pooling(checkpoint(tmp_path, "Qwen3Model"), msgspec.structs.replace(plan, family=None))
    native = as_pooling(checkpoint(tmp_path, "Qwen3Model"), plan)
    for pooling, architecture in ((own, "Qwen3Model"), (native, "Qwen3ForCausalLM")):
        assert (pooling.pools, pooling.config["architectures"]) == (True, [architecture])


@pytest.mark.parametrize(
    ("written", "method"),
    [
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
        (LAST, "last"),
    ],
)
def test_both_spellings_of_the_mode_are_read(tmp_path: Path, written: dict[str, Any], method: str):
    write_modules(tmp_path, **written)
    assert plan_of(tmp_path, "Qwen3ForCausalLM").pooling.method == method


def test_tokens_classify_by_the_output_head(tmp_path: Path):
    tokens = {"classifier_from_token": ["no", "yes"]}
    plan = plan_of(tmp_path, "Qwen3ForCausalLM", convert="classify", **tokens)
    assert (plan.token_names, plan.pooling.size, plan.pooling.activation) == (("no", "yes"), 1, "sigmoid")
    three = plan_of(tmp_path, "Qwen3ForCausalLM", convert="classify", classifier_from_token=["a", "b", "c"])
    assert (three.pooling.labels, three.pooling.activation) == (("a", "b", "c"), "softmax")


@pytest.mark.parametrize(
    ("architecture", "wishes", "config", "words"),
    [
        ("BertModel", {"runner": "generate"}, {"model_type": "bert"}, "generates no text"),
        ("LlamaForCausalLM", {"runner": "generate", "convert": "embed"}, {}, "set runner to pooling"),
        ("LlamaForCausalLM", {"runner": "pooling", "convert": "none"}, {}, "only when it is converted"),
        ("LlamaForCausalLM", {"convert": "classify"}, {}, "classifier_from_token"),
        ("LlamaForCausalLM", {"convert": "classify"}, {"classifier_from_token": "yes"}, "a list of tokens"),
        ("CLIPModel", {}, {"model_type": "clip"}, "encoders are bert"),
        ("GemmaForSequenceClassification", {}, {"model_type": "gemma"}, "pools in no way"),
        ("LlamaForSequenceClassification", {}, {"id2label": {"1": "x"}}, "id2label"),
        ("LlamaForSequenceClassification", {}, {"num_labels": 10**9}, "num_labels"),
    ],
)
def test_what_does_not_fit_is_told(
    tmp_path: Path, architecture: str, wishes: dict[str, str], config: dict[str, Any], words: str
):
    with pytest.raises((CheckpointError, ConfigError), match=words):
        read_pooling(checkpoint(tmp_path, architecture, **config), **wishes)


@pytest.mark.parametrize(
    ("modules", "pooling", "words"),
    [
        ([("", "Transformer"), ("../elsewhere", "Pooling")], {}, "not a folder beside it"),
        ([("", "Transformer"), ("1_Pooling", "WordWeights")], {}, "WordWeights"),
        (MODULES, {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        (MODULES, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "one of cls, mean, last"),
        (MODULES, {"pooling_mode": "weightedmean"}, "weightedmean"),
        ([*MODULES, ("2_Dense", "Dense")], {}, "2_Dense"),
    ],
)
def test_modules_that_are_not_supported_are_told(
    tmp_path: Path, modules: list[tuple[str, str]], pooling: dict[str, Any], words: str
):
    write_modules(tmp_path, modules, **pooling)
    with pytest.raises(CheckpointError, match=words):
        read_pooling(checkpoint(tmp_path, "Qwen3ForCausalLM"))


def test_families_are_found_by_what_their_names_begin_with():
    assert base_family("Qwen3ForSequenceClassification") == base_family("Qwen3Model") == "Qwen3ForCausalLM"
    assert base_family("BertModel") is None

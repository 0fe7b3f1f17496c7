"""Folders as they are found: complete, sharded, broken and hostile; ids through the hub's cache, without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aserve.core.errors import CheckpointError
from aserve.models.checkpoint import Checkpoint, resolve_checkpoint, resolve_tokenizer

CONFIG = {"architectures": ["LlamaForCausalLM"], "eos_token_id": 2}
INDEX = "model.safetensors.index.json"


def make_folder(folder: Path, *files: str, config: Any = CONFIG, **contents: Any) -> Path:
    """A folder with a config and empty files; contents: JSON by file name, a dot spelt as two underscores."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in files:
        (folder / name).touch()
    for name, content in contents.items():
        (folder / name.replace("__", ".")).write_text(json.dumps(content))
    return folder


def resolve(folder: Path, **options: Any) -> Checkpoint:
    return resolve_checkpoint(str(folder), **options)


def test_a_folder_with_one_file(tmp_path):
    folder = make_folder(
        tmp_path, "model.safetensors", "tokenizer.json", generation_config__json={"eos_token_id": [7, 8]}
    )
    checkpoint = resolve(folder)
    assert checkpoint.path == folder
    assert checkpoint.config == CONFIG
    assert checkpoint.weight_files == (folder / "model.safetensors",)
    assert checkpoint.has_tokenizer
    assert checkpoint.eos_ids == {7, 8}


def test_a_config_alone_is_enough_for_dummy_weights(tmp_path):
    checkpoint = resolve(make_folder(tmp_path))
    assert checkpoint.weight_files == ()
    assert not checkpoint.has_tokenizer
    assert checkpoint.eos_ids == {2}


def test_shards_are_those_of_the_index_each_once(tmp_path):
    weight_map = {"a": "model-2.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    folder = make_folder(
        tmp_path,
        "model-1.safetensors",
        "model-2.safetensors",
        model__safetensors__index__json={"weight_map": weight_map},
    )
    assert [file.name for file in resolve(folder).weight_files] == ["model-1.safetensors", "model-2.safetensors"]


def test_a_missing_shard_is_named(tmp_path):
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    folder = make_folder(tmp_path, "model-1.safetensors", model__safetensors__index__json={"weight_map": weight_map})
    with pytest.raises(CheckpointError, match=r"1 of 2 shards are missing, the first is model-2\.safetensors"):
        resolve(folder)


@pytest.mark.parametrize(
    "index", [{}, {"weight_map": {}}, {"weight_map": {"a": "../x.safetensors"}}, {"weight_map": [1]}]
)
def test_an_index_that_leads_nowhere_is_refused(tmp_path, index):
    with pytest.raises(CheckpointError, match="weight_map must map"):
        resolve(make_folder(tmp_path, model__safetensors__index__json=index))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickled_weights_are_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match=f"{name} is refused, because a pickle can run code"):
        resolve(make_folder(tmp_path, name))


def test_pickled_weights_beside_safetensors_are_not_looked_at(tmp_path):
    folder = make_folder(tmp_path, "model.safetensors", "pytorch_model.bin", "training_args.bin")
    assert resolve(folder).weight_files == (folder / "model.safetensors",)


def test_shards_without_an_index_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors is there, but neither"):
        resolve(make_folder(tmp_path, "model-1.safetensors"))


@pytest.mark.parametrize(
    "change",
    [
        {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}},
        {"text_config": {"auto_map": {}}},
        {"trust_remote_code": True},
        {"_attn_implementation_internal": "someone/kernels"},
        {"text_config": {"_attn_implementation": {"": "someone/kernels@main"}}},
    ],
)
def test_configs_that_ask_to_run_code_need_trust(tmp_path, change):
    folder = make_folder(tmp_path, config=CONFIG | change)
    with pytest.raises(CheckpointError, match="--trust-remote-code"):
        resolve(folder)
    assert resolve(folder, trust_remote_code=True).config == CONFIG | change


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\ud800"])
def test_a_config_that_is_no_json_object_is_one_line(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        resolve(tmp_path)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/model", "a/b/c", "~/nowhere-at-all"])
def test_a_path_that_is_not_there_is_not_sought_on_the_hub(name):
    with pytest.raises(CheckpointError, match="no such folder"):
        resolve_checkpoint(name)


def test_a_file_is_no_folder_and_is_told_to_be_there(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"model\.gguf: this is a file; a model is a folder"):
        resolve_checkpoint(str(tmp_path / "model.gguf"))


def test_a_folder_without_config_is_no_model(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        resolve(tmp_path)


def test_a_tokenizer_of_its_own(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        resolve_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").touch()
    assert resolve_tokenizer(str(tmp_path)) == tmp_path


OFFLINE = """
import sys
from aserve.core.errors import CheckpointError
from aserve.models.checkpoint import resolve_checkpoint
for name in ("someone/cached", "someone/unknown", "not a name"):
    try:
        print(resolve_checkpoint(name, download_dir=sys.argv[1]).weight_files[0].name)
    except CheckpointError as error:
        print(error)
"""


@pytest.mark.slow
def test_an_id_comes_from_the_cache_when_the_hub_is_switched_off(tmp_path):
    repository = tmp_path / "models--someone--cached"
    make_folder(repository / "snapshots" / "abc123", "model.safetensors")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    lines = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(tmp_path)],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert lines[0] == "model.safetensors"
    assert "someone/unknown: not a local folder, not in the cache" in lines[1]
    assert "not a name: " in lines[2]
    assert len(lines) == 3

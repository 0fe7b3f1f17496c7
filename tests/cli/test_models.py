"""`aserve models`: what is in the hub's cache, told by headers alone."""

import json
from pathlib import Path

import msgspec
import pytest

from aserve.cli.models import Listing, in_lines, list_models
from aserve.core.config import Options
from aserve.model_folder import DEMO_FOLDER
from tests.checkpoints import write_checkpoint
from tests.cli.program import aserve, modules_after

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached(cache: Path, repo: str, files: dict[str, bytes], kind: str = "models") -> Path:
    """Put a model into a cache as the hub has it: blobs, a snapshot of links, a ref."""
    folder = cache / f"{kind}--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    for part in (snapshot, folder / "blobs", folder / "refs"):
        part.mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    for index, (name, content) in enumerate(files.items()):
        blob = folder / "blobs" / f"{index:040x}"
        blob.write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(name="cache")
def make_cache(tmp_path):
    cache = tmp_path / "hub"
    demo = files_of(DEMO_FOLDER)
    cached(cache, "some/demo", demo)
    cached(cache, "org/half", {name: content for name, content in demo.items() if name != "model.safetensors"})
    cached(cache, "org/pickled", {"config.json": demo["config.json"], "pytorch_model.bin": b"x"})
    cached(cache, "org/picture", {"model_index.json": b"{}"})
    cached(cache, "org/text", {"a.txt": b"x"}, kind="datasets")
    return cache


def test_each_model_is_told_with_its_size_and_whether_it_can_be_served(cache):
    listing = list_models(Options(download_dir=str(cache)))
    found = {model.name: model for model in listing.models}
    assert list(found) == ["demo", "org/half", "org/pickled", "org/picture", "some/demo"]
    for name in ("demo", "some/demo"):
        model = found[name]
        assert (model.architecture, model.task, model.fits, model.problem) == (
            "LlamaForCausalLM",
            "generate",
            True,
            None,
        )
        assert model.memory_bytes == 6689280
    assert found["some/demo"].revision == COMMIT
    assert found["some/demo"].disk_bytes == sum(map(len, files_of(DEMO_FOLDER).values()))
    assert "no .safetensors weights" in (found["org/half"].problem or "")
    assert "a pickle can run code" in (found["org/pickled"].problem or "")
    assert "no config.json" in (found["org/picture"].problem or "")
    assert listing.problem is None


def test_what_does_not_fit_is_told(cache, monkeypatch):
    monkeypatch.setattr("aserve.cli.models.free_memory_bytes", lambda: 6 * 2**20)
    listing = list_models(Options(download_dir=str(cache)))
    assert [model.fits for model in listing.models if model.problem is None] == [False, False]
    quantized = list_models(Options(download_dir=str(cache), quantization="int8"))
    assert quantized.models[0].memory_bytes < listing.models[0].memory_bytes


def test_a_table_for_people(cache):
    lines = list(in_lines(list_models(Options(download_dir=str(cache))), 100))
    assert lines[0].split() == ["MODEL", "ON", "DISK", "IN", "MEMORY", "FITS", "ARCHITECTURE"]
    assert lines[1].split()[:6] == ["demo", "6.5", "MiB", "6.4", "MiB", "yes"]
    assert "cannot be served: " in lines[2]
    assert lines[-1].endswith("More of one: aserve doctor MODEL. Start one: aserve serve MODEL")


def test_no_cache_and_an_empty_one_are_told(tmp_path):
    listing = list_models(Options(download_dir=str(tmp_path / "none")))
    assert listing.problem == f"there is no cache at {tmp_path / 'none'}"
    assert [model.name for model in listing.models] == ["demo"]
    assert list_models(Options(download_dir=str(tmp_path))).problem == f"{tmp_path} has no model of text"
    assert "From the hub: none, since there is no cache at" in "\n".join(in_lines(listing, 100))
    file = tmp_path / "file"
    file.write_text("x")
    assert "cannot be read" in (list_models(Options(download_dir=str(file))).problem or "")


def test_a_model_of_another_architecture_is_told_too(tmp_path):
    folder = write_checkpoint(tmp_path / "gpt2", "gpt2")
    cached(tmp_path / "hub", "openai/gpt2", files_of(folder))
    [_, model] = list_models(Options(download_dir=str(tmp_path / "hub"))).models
    assert (model.architecture, model.problem) == ("GPT2LMHeadModel", None)


@pytest.mark.e2e
@pytest.mark.slow
def test_the_command_finds_the_cache_by_the_environment(cache):
    done = aserve("models", "--json", HF_HUB_CACHE=str(cache))
    assert done.code == 0
    listing = msgspec.convert(json.loads(done.out), Listing)
    assert (listing.cache, len(listing.models)) == (str(cache), 5)


@pytest.mark.e2e
@pytest.mark.slow
def test_neither_torch_nor_transformers_is_imported(cache):
    code, modules = modules_after("models", "--download-dir", str(cache))
    assert code == 0
    assert not modules & {"torch", "transformers", "rich", "prompt_toolkit", "numpy"}

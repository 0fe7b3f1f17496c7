"""vLLM's own tests: how their outcomes are read, and what they are laid out with. They themselves are not run here."""

import json
import tarfile

import pytest
from huggingface_hub import snapshot_download
from peers.vllm_tests import empty_adapter, lay_out, left_out, long_demo, models_named, snapshot, verdicts
from peers.vllm_tests_plugin import translated

from aserve.models.checkpoint import resolve_checkpoint
from aserve.models.peft import Module, inspect_adapter

LISTED = {
    "not_applicable": {"no images here": ["a/test_images.py"]},
    "their_model": {"its tokens are counted": ["a/test_x.py::test_usage"]},
    "deliberate": {"names are strict": ["a/test_x.py::test_names", "a/test_x.py::test_mended"]},
}


def outcome(test, outcome, why=""):
    return {"test": f"tests/a/{test}", "outcome": outcome, "why": why}


def test_one_case_that_fails_makes_its_function_fail_unless_it_is_listed():
    lines = [
        outcome("test_x.py::test_good[1]", "passed"),
        outcome("test_x.py::test_good[2]", "passed"),
        outcome("test_x.py::test_bad[1]", "passed"),
        outcome("test_x.py::test_bad[2]", "failed", "AssertionError"),
        outcome("test_x.py::test_usage", "failed"),
        outcome("test_x.py::test_names", "failed"),
        outcome("test_x.py::test_mended", "passed"),
        outcome("test_x.py::test_class", "white box"),
        outcome("test_images.py::test_cat", "left out"),
        outcome("test_broken.py", "failed", "ImportError"),
    ]
    assert [(row.verdict, row.why) for row in verdicts(lines, LISTED)] == [
        ("passed", ""),
        ("failed", "1 of 2 cases: AssertionError"),
        ("their_model", "its tokens are counted"),
        ("deliberate", "names are strict"),
        ("failed", "it passes, though it is listed: names are strict"),
        ("not_applicable", "asks vLLM's own classes, and no server"),
        ("not_applicable", "no images here"),
        ("failed", "1 of 1 cases: ImportError"),
    ]


def test_flags_that_aserve_has_are_kept_and_the_others_told(tmp_path, monkeypatch):
    outcomes = tmp_path / "outcomes"
    monkeypatch.setenv("TESTS_OF_ASERVE", json.dumps({"outcomes": str(outcomes)}))
    words = ["--dtype", "bfloat16", "--max_model_len", "8192", "--lora-modules", "a=/a", "b=/b", "--api-key=k", "--uds"]
    kept = ["--max-model-len", "8192", "--lora-modules", "a=/a", "b=/b", "--api-key", "k"]
    assert translated(words) == kept
    assert [json.loads(line) for line in outcomes.read_text().splitlines()] == [{"flag": "--dtype"}, {"flag": "--uds"}]


def test_functions_of_files_that_are_not_run_are_counted(tmp_path):
    (tmp_path / "test_x.py").write_text("def test_a():\n    pass\nclass TestB:\n    async def test_b(self): ...\n")
    lines = left_out(tmp_path, ["test_x.py", "test_y.py::test_c"])
    assert [line["test"] for line in lines] == ["test_x.py::test_a", "test_x.py::test_b"]


@pytest.fixture
def source(tmp_path):
    """A checkout, as far as it is looked at."""
    folder = tmp_path / "vllm-0"
    for name in ("tests/entrypoints", "examples", "vllm"):
        (folder / name).mkdir(parents=True)
    (folder / "tests/entrypoints/test_x.py").write_text('MODEL, URL = "Owner/Model-7B", "https://a/b"\n')
    (folder / "pyproject.toml").write_text("")
    return folder


def test_a_checkout_and_a_source_package_are_laid_out_alike(source, tmp_path):
    """vLLM's own package is left out: the installed one is to be imported."""
    with tarfile.open(tmp_path / "vllm-0.tar.gz", "w:gz") as package:
        package.add(source, "vllm-0")
    for number, given in enumerate((source, tmp_path / "vllm-0.tar.gz")):
        folder = tmp_path / str(number)
        lay_out(given, folder)
        assert {path.name for path in folder.iterdir()} == {"tests", "examples", "pyproject.toml"}
        assert models_named(folder / "tests/entrypoints") == {"Owner/Model-7B"}


def test_every_name_leads_to_a_model_that_aserve_can_serve(tmp_path):
    snapshot(tmp_path / "cache", "Owner/Model").symlink_to(long_demo(tmp_path / "demo"))
    found = snapshot_download("Owner/Model", cache_dir=tmp_path / "cache/hub", local_files_only=True)
    assert resolve_checkpoint(found).config["max_position_embeddings"] == 32768


def test_the_adapter_is_one_that_peft_would_save(tmp_path):
    name = "model.layers.0.self_attn.q_proj"
    adapter = inspect_adapter(empty_adapter(tmp_path / "adapter"), {name: Module(256, 256)}, max_rank=8)
    assert (adapter.rank, adapter.scale, list(adapter.names)) == (8, 1.0, [name])

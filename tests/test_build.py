"""build.py: options to parts, on tiny checkpoints; and that importing aserve costs nothing."""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

import aserve
from aserve.build import AsyncEngine, load, make_options
from aserve.core.errors import CheckpointError, ConfigError, OverloadedError, UnavailableError
from aserve.core.graph_sizes import GraphSizes
from aserve.core.ids import RequestId
from aserve.core.params import SamplingParams
from aserve.core.request import Request
from aserve.engine import EngineParts, Progress
from aserve.kernels.dispatch import describe, select_ops
from aserve.kv_cache.host_memory import has_host_tier
from aserve.loading import default_sampling
from aserve.runner.runner import ModelRunner
from aserve.telling import startup_lines
from tests.checkpoints import EOS_ID, VOCAB_SIZE, checkpoints

__all__ = ["checkpoints"]
pytestmark = pytest.mark.torch


@pytest.fixture
def folder(checkpoints: Callable[[str], Path], tmp_path: Path) -> Path:
    """A llama checkpoint of this test's own."""
    return Path(shutil.copytree(checkpoints("llama"), tmp_path / "tiny"))


def parts_of(folder: Path, **options: object) -> EngineParts:
    """Loaded with a small cache, and closed."""
    parts = load(make_options(model=folder, **{"device": "cpu", "kv_cache_memory_bytes": 2**20, **options}), print)
    parts.runner.close()
    return parts


def write(folder: Path, file: str, **changes: object) -> None:
    """Change keys of one of the folder's JSON files; None removes."""
    path = folder / file
    content = {**(json.loads(path.read_text()) if path.exists() else {}), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


async def test_an_engine_answers_from_a_folder(folder):
    stages: list[Progress] = []
    engine = AsyncEngine(folder, on_progress=stages.append, device="cpu", kv_cache_memory_bytes=2**20)
    with pytest.raises(UnavailableError):
        engine.startup_lines()
    async with engine:
        completion = await engine.complete("hello", SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))
        assert len(completion.token_ids) == 5
        assert engine.startup_lines()
    names = list(dict.fromkeys(progress.stage for progress in stages))
    assert names == ["finding the model", "loading torch", "weights", "tokenizer", "memory", "warming up"]
    num_bytes = (folder / "model.safetensors").stat().st_size
    assert Progress("weights", num_bytes, num_bytes, "B") in stages


async def test_two_engines_live_in_one_event_loop(folder):
    limits = {"device": "cpu", "kv_cache_memory_bytes": 2**20}
    params = SamplingParams(max_tokens=5, temperature=0.0)
    async with AsyncEngine(folder, **limits) as one, AsyncEngine(folder, load_format="dummy", **limits) as other:
        answers = [await engine.complete("hello", params) for engine in (one, other, one)]
    assert answers[0] == answers[2] != answers[1]


def test_what_the_faces_need_to_know(folder):
    info = parts_of(folder, max_model_len=128).info
    assert info.names == (str(folder), "tiny")
    assert (info.vocab_size, info.max_model_len, info.eos_ids) == (VOCAB_SIZE, 128, {EOS_ID})
    assert parts_of(folder, served_model_name="mine").info.names == ("mine",)
    assert parts_of(folder, served_model_name=["a", "b"]).info.names == ("a", "b")


def test_the_tokenizer_names_the_end_where_no_config_does(folder):
    for file in ("config.json", "generation_config.json"):
        write(folder, file, eos_token_id=None)
    assert parts_of(folder).info.eos_ids == {EOS_ID}


def test_a_tokenizer_from_elsewhere(folder, tmp_path):
    (tmp_path / "tokenizer").mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).rename(tmp_path / "tokenizer" / file)
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        parts_of(folder)
    assert parts_of(folder, tokenizer=str(tmp_path / "tokenizer")).tokenizer.encode("hello")


def test_the_demo_models_tokenizer_may_stand_in_for_one_that_is_missing(folder):
    (folder / "tokenizer.json").unlink()
    assert parts_of(folder, tokenizer="demo", load_format="dummy").tokenizer.encode("hello")


def test_generation_config_sets_sampling_defaults_unless_told_not_to(folder):
    write(folder, "generation_config.json", do_sample=False, temperature=0.6, top_k=20, repetition_penalty=1.1)
    assert parts_of(folder).info.default_sampling == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    assert parts_of(folder, generation_config="none").info.default_sampling == {}


@pytest.mark.parametrize("fields", [{"temperature": 7}, {"top_p": 0}, {"top_k": "many"}])
def test_sampling_defaults_that_no_request_may_have_are_refused(fields):
    with pytest.raises(CheckpointError, match=r"generation_config\.json: .*--generation-config none"):
        default_sampling(fields)


def test_evicted_prefixes_live_on_in_the_swap_space_where_that_is_measured_to_pay(folder):
    parts = parts_of(folder, swap_space=0.001)
    config = msgspec.structs.replace(parts.config, recompute_cost_s=1e-3, swap_cost_s=1e-4)
    assert has_host_tier(config)
    assert not has_host_tier(msgspec.structs.replace(config, swap_cost_s=1.0))
    assert not has_host_tier(msgspec.structs.replace(config, num_host_blocks=0))
    (line,) = (line for line in parts.config.notes if line.startswith("swap space: "))
    assert ("evicted prefixes" in line) == has_host_tier(parts.config)


async def test_memory_pressure_is_met_as_wished(folder):
    short = {"kv_cache_memory_bytes": 13 * 8 * 256, "block_size": 8, "max_model_len": 96, "device": "cpu"}
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1, ignore_eos=True, n=4)
    counts, answers = {}, {}
    for mode in ("recompute", "swap"):
        async with AsyncEngine(folder, **short, swap_space=0.001, preemption_mode=mode) as engine:
            async with engine.open("hello", params) as mailbox:
                deltas = [delta async for delta in mailbox]
            answers[mode] = [[t for d in deltas if d.index == k for t in d.token_ids] for k in range(4)]
            counts[mode] = engine.statistics()
    assert counts["recompute"].num_preemptions > counts["recompute"].num_swap_outs == 0
    assert counts["swap"].num_preemptions == counts["swap"].num_swap_outs > 0
    assert answers["swap"] == answers["recompute"]


async def test_the_queue_and_its_order_are_as_wished(folder):
    parts = parts_of(folder, scheduling_policy="priority", max_num_queued_reqs=2, long_prefill_token_threshold=3)
    asked = {"prompt_token_ids": tuple(range(1, 9)), "params": SamplingParams(), "max_tokens": 1, "seed": 0}
    for name, priority in (("late", 1), ("early", 0)):
        parts.scheduler.add(Request(id=RequestId(name), priority=priority, arrival_s=0.0, **asked))
    with pytest.raises(OverloadedError, match="2 requests are waiting"):
        parts.scheduler.add(Request(id=RequestId("refused"), arrival_s=0.0, **asked))
    plan = parts.scheduler.plan(0.0)
    assert [piece.num_tokens for piece in plan.slices] == [3, 3]
    assert [int(piece.seq_id) for piece in plan.slices] == [1, 0]


def test_the_plan_is_printed(folder):
    write(folder, "generation_config.json", temperature=0.6)
    parts = parts_of(folder, block_size=8)
    assert startup_lines(parts) == [
        f"model: {folder}, 0.1 MiB of weights as float32 on cpu",
        "KV cache: 511 blocks x 8 = 4088 tokens, 1.0 MiB, as kv_cache_memory_bytes says",
        "concurrency: 7 sequences at the full length of 512 tokens, 256 at most; others wait",
        "generation_config.json: temperature 0.6",
        "tool calls: none known of this model; thoughts: none known of this model",
        *describe(select_ops(torch.device("cpu"))),
    ]
    dummy = startup_lines(parts_of(folder, load_format="dummy", dtype="bfloat16", seed=3))
    assert dummy[0] == f"model: {folder}, random weights (seed 3) as bfloat16 on cpu"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 3}, "unknown option max_num_seq; did you mean max_num_seqs?"),
        ({"colour": "red"}, "unknown option colour"),
        ({"max_num_seqs": "3"}, r"max_num_seqs must be an integer in \[1, 65536\], got '3'"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, got 'tpu'"),
    ],
)
def test_a_wrong_option_is_one_clear_line(options, message):
    with pytest.raises(ConfigError, match=message):
        AsyncEngine("demo", **options)


async def test_loading_that_fails_raises_on_entering(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        async with AsyncEngine(str(tmp_path / "nowhere")):
            pass


def test_cuda_where_there_is_none_is_a_config_error(folder):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ConfigError, match="no GPU"):
        parts_of(folder, device="cuda")


def test_memory_that_runs_out_is_a_config_error(folder):
    import torch

    def run_out(progress: Progress) -> None:
        if progress.stage == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. GPU 0 has 1 MiB free. Of the allocated memory, 9 is ours")

    with pytest.raises(ConfigError, match=r"do not fit the GPU.*max_num_seqs.*1 MiB free\)$"):
        load(make_options(model=folder, device="cpu"), run_out)


def test_a_runner_that_cannot_warm_up_is_closed(folder, monkeypatch):
    closed: list[ModelRunner] = []
    close = ModelRunner.close

    def noted_close(self: ModelRunner) -> None:
        closed.append(self)
        close(self)

    def run_out(self: ModelRunner) -> None:
        raise MemoryError

    monkeypatch.setattr(ModelRunner, "close", noted_close)
    monkeypatch.setattr(ModelRunner, "warm_up", run_out)
    with pytest.raises(MemoryError):
        parts_of(folder)
    assert len(closed) == 1


def test_graphs_are_for_whom_wants_them(folder, monkeypatch):
    asked: list[torch.device] = []
    monkeypatch.setattr("aserve.runner.graph_device.graph_device", asked.append)
    parts_of(folder, enforce_eager=True)
    assert asked == []
    parts_of(folder)
    assert asked == [torch.device("cpu")]


def test_parts_are_frozen(folder):
    with pytest.raises(dataclasses.FrozenInstanceError):
        parts_of(folder).info = None  # type: ignore[misc]


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = aserve.Engine


@pytest.mark.slow
def test_importing_the_public_names_loads_no_torch():
    program = (
        "import sys; from aserve import LLM, AsyncEngine, SamplingParams; AsyncEngine('demo');"
        "print('torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


def test_random_weights_need_nothing_but_a_config(folder, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(folder / "config.json", bare)
    parts = parts_of(bare, load_format="dummy")
    assert parts.tokenizer.decode(parts.tokenizer.encode("hello")) == "hello"
    assert startup_lines(parts)[0].endswith("the demonstration model's tokenizer as float32 on cpu")
    with pytest.raises(CheckpointError, match="safetensors"):
        parts_of(bare)


def test_weights_of_int8_are_told(folder):
    """A wish that goes nowhere: the drafts' model and the loader are given options by hand."""
    notes = parts_of(folder, quantization="int8-g32").config.notes
    assert "linear layers kept as int8-g32, as float32 on cpu" in notes[0]
    with pytest.raises(ConfigError, match=r"quantization must be .*int8, int8-g128, int8-g32, fp8, got 'fp4'"):
        make_options(quantization="fp4")


def test_a_cache_of_another_type_is_told_and_holds_more(folder):
    """A wish that goes nowhere; and a draft model's cache, which has room for as many tokens."""
    sizes = {"dtype": "float32", "kv_cache_memory_bytes": 2**20}
    whole, half = parts_of(folder, **sizes), parts_of(folder, **sizes, kv_cache_dtype="bfloat16")
    assert "1.0 MiB as bfloat16, as kv_cache_memory_bytes says" in half.config.notes[1]
    assert half.config.num_blocks == 2 * whole.config.num_blocks
    with pytest.raises(ConfigError, match="kv_cache_dtype fp8: there is none but on a GPU; choose bfloat16"):
        parts_of(folder, kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, bfloat16, fp8, got 'int8'"):
        make_options(kv_cache_dtype="int8")


def test_plans_know_the_steps_that_a_gpu_launches_by_one_call(folder, monkeypatch):
    sizes = GraphSizes((0, 8), (64, 128), num_prompts=16, cheap_tokens=256)
    assert parts_of(folder).config.graph_sizes is None
    monkeypatch.setattr(ModelRunner, "graph_sizes", sizes)
    parts = parts_of(folder)
    assert parts.config.graph_sizes == sizes
    assert parts.scheduler.step_cost.graph_sizes == sizes

"""`aserve doctor`: what it foretells is what the engine then has; and it says what is missing, in words."""

import gc
import json
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from aserve.cli import checks, commands
from aserve.cli.doctor import machine as machine_room
from aserve.cli.doctor.machine import Kernels, cpu_kernels, free_memory_bytes, size
from aserve.cli.doctor.plan import STEP_BYTES, KVPlan, Machine, make_plan
from aserve.cli.doctor.words import in_words
from aserve.core.config import Options
from aserve.core.errors import CheckpointError, ConfigError
from aserve.kernels.native import library as native
from aserve.model_folder import DEMO_FOLDER
from aserve.weight_plan import plan_weights
from tests.checkpoints import write_checkpoint
from tests.cli.program import aserve, modules_after
from tests.pooling_checkpoints import write_pooling

MACHINE = Machine(
    device="cpu",
    name="2 cores",
    num_cores=2,
    free_bytes=20 * 2**30,
    total_bytes=24 * 2**30,
    read_bytes_per_s=10e9,
    kernels=Kernels("native", "avx2"),
)


WIDE = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}


def plan_of(machine: Machine = MACHINE, **options: Any):
    return make_plan(Options(device="cpu", **options), machine, copies_tied_head=False)


# The engine's own numbers


def tensors_of(owner: object) -> Iterator[Any]:
    """Every tensor that an object holds, however deep."""
    import torch

    seen: set[int] = set()
    pending = [owner]
    while pending:
        one = pending.pop()
        if id(one) in seen or isinstance(one, type) or type(one).__name__ in ("module", "function", "Library"):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield one
        else:
            pending += gc.get_referents(one)


def weight_bytes(model: Any) -> int:
    """Of its parameters, each byte once; the rope table is none of them."""
    spans = set()
    for tensor in tensors_of(model):
        if tensor.shape != model_rope_shape(model):
            spans.add((tensor.data_ptr(), tensor.nbytes))
    return sum(num_bytes for _, num_bytes in spans)


def model_rope_shape(model: Any) -> tuple[int, ...]:
    return (model.spec.context_len, model.spec.head_dim)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int8", "int8-g32"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_take_what_was_foretold(tmp_path, dtype, tied, quantization):
    import torch

    from aserve.kernels.dispatch import select_ops
    from aserve.kernels.native.native_linear import can_be_native
    from aserve.kernels.native.native_ops import NativeOps
    from aserve.model_folder import find_model
    from aserve.models.loader import load_model
    from aserve.planning import spec_of

    write_checkpoint(tmp_path, "llama", **WIDE, tie_word_embeddings=tied)
    options = Options(model=str(tmp_path), dtype=dtype, quantization=quantization, device="cpu")
    ops = select_ops(torch.device("cpu"))
    if not isinstance(ops, NativeOps) or not can_be_native(getattr(torch, dtype)):
        pytest.skip("packed copies of torch's are not tensors that can be looked at")
    checkpoint, _ = find_model(options)
    model = load_model(checkpoint, device="cpu", ops=ops, dtype=dtype, quantization=quantization)
    foretold = plan_weights(checkpoint, spec_of(checkpoint), options)
    assert weight_bytes(model) == pytest.approx(foretold.memory_bytes, rel=0.02)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    "wishes",
    [
        {},
        {"max_model_len": 100, "block_size": 32, "max_num_seqs": 3},
        {"kv_cache_memory_bytes": 2**22},
        {"kv_cache_memory_bytes": 2**20},
        {"speculative_config": {"model": "demo", "num_speculative_tokens": 2}, "kv_cache_memory_bytes": 2**23},
    ],
)
@pytest.mark.parametrize("model", ["demo", "windows"])
def test_the_kv_cache_is_what_was_foretold(tmp_path, model, wishes):
    from aserve.build import load

    if model == "windows":
        if "speculative_config" in wishes:
            pytest.skip("its vocabulary is not the demonstration model's")
        model = str(write_checkpoint(tmp_path, "qwen2_windows"))
    plan = plan_of(model=model, **wishes)
    options = Options(model=model, device="cpu", **wishes)
    parts = load(options, lambda _: None)
    try:
        config = parts.config
        assert plan.kv is not None
        assert (plan.kv.num_blocks, plan.kv.num_tokens) == (config.num_blocks - 1, config.num_kv_tokens)
        assert (plan.kv.max_model_len, plan.kv.num_full_len) == (config.max_model_len, config.num_full_len)
        assert plan.kv.max_num_seqs == config.max_num_seqs
        assert plan.kv.num_bytes == pytest.approx(parts.runner._kv.planes_YBX.nbytes, rel=0.001)
    finally:
        parts.runner.close()


@pytest.mark.torch
@pytest.mark.slow
def test_memory_is_measured_within_a_second():
    import torch

    machine_room.read_bytes_per_s(torch.device("cpu"))  # the first use of torch's threads
    start = time.perf_counter()
    speed = machine_room.read_bytes_per_s(torch.device("cpu"))
    assert time.perf_counter() - start < 3.0
    assert 1e8 < speed < 1e13


# What it says


def test_figures_in_words():
    shown = in_words(plan_of(model="demo"), 200)
    for told in (
        "LlamaForCausalLM, 3.3 million parameters, computed by aserve's own code",
        "6.4 MiB in memory, as bfloat16",
        "2048 tokens, prompt and answer of a request together",
        "1.0 KiB a token. Room for 524288 tokens, in 32768 blocks of 16",
        "256 requests, even of that full length; others wait",
        "at most about 1,500 tokens a second",
        "aserve's own, compiled for avx2",
        "Nothing is missing.",
        "Start it with: aserve serve demo",
    ):
        assert told in shown
    assert max(map(len, in_words(plan_of(model="demo"), 60).splitlines())) <= 60


def test_a_wish_for_a_shorter_context_is_told_as_such():
    assert "100 tokens, prompt and answer of a request together (as you wish; the model could do 2048)" in in_words(
        plan_of(model="demo", max_model_len=100), 200
    )
    told = in_words(plan_of(model="demo", kv_cache_memory_bytes=2**20), 200)
    assert "(all that there is room for; the model could do 2048)" in told


def test_formats_of_calls_and_thoughts_are_told_where_there_are_any():
    plan = plan_of(model="demo")
    assert "calls of tools as hermes writes them; no thoughts" in in_words(plan, 200)
    thinks = msgspec.structs.replace(plan, call_format=None, thought_format="think")
    assert "no calls of tools; thoughts as think writes them" in in_words(thinks, 200)


def test_what_does_not_fit_is_told_and_stops():
    small = msgspec.structs.replace(MACHINE, free_bytes=2**20)
    plan = plan_of(small, model="demo")
    assert not plan.can_run
    told = in_words(plan, 200)
    assert "It cannot run so: the weights take 6.4 MiB, and 1.0 MiB of memory are free. What helps: --quantizat" in told
    assert "Start it with" not in told


def test_a_quantization_that_there_is_not_here_is_told_and_stops():
    plan = plan_of(model="demo", quantization="fp8")
    assert not plan.can_run
    assert "It cannot run so: quantization fp8: there is none but on a GPU; choose int8 on a CPU" in in_words(plan, 200)
    assert plan_of(model="demo", quantization="int8").can_run
    cached = plan_of(model="demo", kv_cache_dtype="fp8")
    assert "It cannot run so: kv_cache_dtype fp8: there is none but on a GPU; choose bfloat16" in in_words(cached, 200)


def test_keys_and_values_of_a_smaller_type_are_reckoned_with():
    sizes = {"model": "demo", "dtype": "float32", "kv_cache_memory_bytes": 2**24}
    whole, half = plan_of(**sizes), plan_of(**sizes, kv_cache_dtype="bfloat16")
    assert half.can_run
    assert half.kv.bytes_per_token * 2 == whole.kv.bytes_per_token
    assert half.kv.num_blocks == 2 * whole.kv.num_blocks + 1  # the null block, too, is half as large


def test_what_is_missing_is_told(tmp_path):
    write_checkpoint(tmp_path, "llama")
    for path in tmp_path.glob("tokenizer*"):
        path.unlink()
    kernels = Kernels("torch", "no C++ compiler was found (g++): install one")
    machine = msgspec.structs.replace(MACHINE, kernels=kernels, why_no_gpu="there is no NVIDIA driver here")
    plan = plan_of(machine, model=str(tmp_path))
    told = in_words(plan, 2000)
    assert not plan.can_run
    assert "no C++ compiler was found (g++): install one" in told
    assert "no GPU is used, since there is no NVIDIA driver here" in told
    assert "--tokenizer names another folder that has one" in told
    config = DEMO_FOLDER / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(config.read_bytes())
    without = plan_of(model=str(tmp_path), load_format="dummy", hf_overrides={"vocab_size": 4096})
    assert (without.can_run, without.has_tokenizer, without.has_chat_template) == (True, True, False)
    assert "Note: there is no chat template, so that chats are refused. What" in in_words(without, 200)


def test_texts_that_are_amiss_are_told_as_what_they_are(tmp_path):
    """Catches a tokenizer that is said to be missing where something else is wrong, and what stops a start unsaid."""
    write_checkpoint(tmp_path, "llama")
    (tmp_path / "tokenizer.json").write_bytes((DEMO_FOLDER / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% if")
    (tmp_path / "generation_config.json").write_text('{"top_p": 2.0}')
    options = {"model": str(tmp_path), "load_format": "dummy", "hf_overrides": {"vocab_size": 4096}}
    told = in_words(plan_of(**options), 2000)
    assert "It cannot run so: generation_config.json: top_p must be in (0, 1], got 2.0" in told
    assert "a tokenizer, a chat template" in told
    assert (
        "Note: the model's chat template is malformed: unexpected 'end of template'; so chats are refused. What" in told
    )
    assert plan_of(**options, generation_config="none").can_run
    told = in_words(plan_of(**options, tool_call_parser="no-such"), 2000)
    assert "It cannot run so: tool_call_parser must be one of auto" in told
    assert "another folder" not in told


def test_on_a_gpu_figures_are_about_right_and_leave_room_for_a_step():
    gpu = Machine(
        device="cuda",
        name="H100",
        num_cores=16,
        free_bytes=70 * 2**30,
        total_bytes=80 * 2**30,
        read_bytes_per_s=3e12,
        kernels=None,
    )
    plan = make_plan(Options(max_num_seqs=2**16, block_size=256), gpu, copies_tied_head=False)
    assert plan.kv is not None
    room = 70 * 2**30 - plan.weights.memory_bytes - STEP_BYTES
    assert room - 2**20 < plan.kv.num_bytes <= room
    told = in_words(plan, 200)
    assert told.startswith("demo on this machine, a GPU (H100), 70.0 GiB of 80.0 GiB of memory free")
    assert "KV cache     about 69.0 GiB" in told
    assert not make_plan(Options(), msgspec.structs.replace(gpu, free_bytes=2**20), copies_tied_head=False).can_run


def test_a_model_that_pools_makes_numbers(tmp_path):
    write_pooling(tmp_path, "bert")
    plan = plan_of(model=str(tmp_path))
    assert (plan.task, plan.kv, plan.tokens_per_s) == ("embed", None, None)
    assert "it makes numbers of a text, and answers no chats" in in_words(plan, 200)


def test_a_model_of_transformers_is_told_to_be_about_right(tmp_path):
    plan = plan_of(model=str(write_checkpoint(tmp_path, "gpt2", num_key_value_heads=4)))
    assert (plan.is_native, plan.is_exact) == (False, False)
    assert plan.kv is not None
    assert plan.kv.bytes_per_token == 2 * 2 * 32 * 4  # keys and values of 2 layers of 32 numbers
    told = in_words(plan, 300)
    assert "computed by transformers, which is slower" in told
    assert "KV cache     about " in told


def test_kernels_are_told_without_compiling_any(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "own_variant", lambda: "avx2")
    monkeypatch.setattr(machine_room, "own_variant", lambda: "avx2")
    monkeypatch.setattr(machine_room, "find", lambda variant: tmp_path)
    assert cpu_kernels() == Kernels("native", "avx2")
    monkeypatch.setattr(machine_room, "find", lambda variant: None)
    monkeypatch.setattr(native, "_COMPILERS", ("python3",))
    assert cpu_kernels() == Kernels("to_compile", "avx2")
    monkeypatch.setattr(native, "_COMPILERS", ("no-such-compiler",))
    assert cpu_kernels() == Kernels("torch", "no C++ compiler was found (no-such-compiler): install one")


def test_a_containers_limit_is_memory_that_is_not_free(monkeypatch, tmp_path):
    monkeypatch.setattr(machine_room, "CGROUP", tmp_path)
    whole = free_memory_bytes()
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert free_memory_bytes() == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory_bytes() == pytest.approx(whole, rel=0.2)


def test_what_the_kernel_calls_available_is_free(monkeypatch, tmp_path):
    monkeypatch.setattr(machine_room, "CGROUP", tmp_path)
    monkeypatch.setattr(machine_room, "MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemFree:  1 kB\nMemAvailable:  3 kB\nBuffers:  2 kB\n")
    assert free_memory_bytes() == 3 * 1024


@pytest.mark.parametrize(("cpu_count", "expected"), [(6, 6), (None, 1)])
def test_all_cores_are_counted_where_nobody_says_which_may_be_used(monkeypatch, cpu_count, expected):
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: cpu_count)
    assert machine_room.num_cores() == expected


def test_sizes_for_people():
    assert [size(n) for n in (5, 3 * 2**10, 1.5 * 2**20, 2**31)] == ["5 bytes", "3.0 KiB", "1.5 MiB", "2.0 GiB"]


def test_a_plan_downloads_nothing(monkeypatch, tmp_path, capsys):
    assert commands.main(["doctor", "some/model", "--download-dir", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert told == (
        "aserve: some/model: not a local folder and not in the cache; aserve serve some/model downloads it\n"
    )


def test_a_gpu_that_is_there_is_no_problem(monkeypatch):
    monkeypatch.setattr(checks, "DRIVER", "libnothing.so.9")
    assert "libnothing" in (checks.why_no_gpu() or "")


def test_a_folder_that_no_machine_serves_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no config\.json"):
        plan_of(model=str(tmp_path))


# The real command


@pytest.mark.e2e
@pytest.mark.slow
def test_the_command_writes_words_or_json(monkeypatch, capsys):
    monkeypatch.setattr(commands, "bound_product_caches", lambda environ: None)  # of this process, which lives on
    assert commands.main(["doctor", "demo", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("demo on this machine, on the CPU (")
    assert commands.main(["doctor", "--json", "--device", "cpu", "--max-num-seqs", "4"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["can_run"], plan["kv"]["max_num_seqs"], plan["folder"]) == (True, 4, str(DEMO_FOLDER))
    assert msgspec.convert(plan["kv"], KVPlan).num_full_len == 4


@pytest.mark.e2e
@pytest.mark.slow
def test_a_dry_run_of_serve_is_the_same_and_takes_no_port():
    done = aserve("serve", "--dry-run", "--port", "1", "--device", "cpu", "--pipeline-parallel-size", "1")
    assert done.code == 0
    assert "Start it with: aserve serve demo" in done.out
    assert done.err.startswith("aserve: --pipeline-parallel-size: not supported yet: ")


@pytest.mark.e2e
@pytest.mark.slow
def test_it_reads_no_weights(tmp_path):
    """Catches a plan that opens them with torch: the file has a header, and no bytes behind it that could be read."""
    for path in DEMO_FOLDER.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = tmp_path / "model.safetensors"
    num_bytes = weights.stat().st_size
    header_bytes = 8 + int.from_bytes(weights.read_bytes()[:8], "little")
    header = weights.read_bytes()[:header_bytes]
    with weights.open("wb") as file:
        file.write(header)
        file.truncate(num_bytes)  # a hole: zeros
    code, modules = modules_after("doctor", str(tmp_path), "--device", "cpu")
    assert code == 0
    assert "transformers" not in modules


# Ranks


def test_a_plan_of_ranks_is_of_what_each_of_them_has():
    alone, shared = plan_of().kv, plan_of(tensor_parallel_size=2).kv
    assert alone is not None
    assert shared is not None
    assert shared.bytes_per_token * 2 == alone.bytes_per_token
    told, told_alone = in_words(plan_of(tensor_parallel_size=2), 200), in_words(plan_of(), 200)
    for words in ("processes compute each step together", "MiB in each rank: what is remembered"):
        assert words in told
        assert words not in told_alone
    assert "2 processes" in told


def test_gpus_share_the_weights():
    gpu = msgspec.structs.replace(MACHINE, device="cuda", free_bytes=5 * 2**20, kernels=None)
    alone, shared = (
        make_plan(Options(tensor_parallel_size=size), gpu, copies_tied_head=False).problems for size in (1, 2)
    )
    assert any("the weights take 6.4 MiB" in problem.what for problem in alone)
    assert not any("the weights take" in problem.what for problem in shared)


def test_what_ranks_cannot_share_is_refused_by_the_name_of_the_flag():
    with pytest.raises(ConfigError, match="tensor_parallel_size 3 does not divide the model's 8 attention heads"):
        plan_of(tensor_parallel_size=3)

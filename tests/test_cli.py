"""The command line: precedence, reading of values, and complaints of one line that name the flag."""

import gc
import json
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from aserve import __version__
from aserve.cli import commands, flags, settings
from aserve.cli.chat import commands as slash_commands
from aserve.cli.command_table import ALL_NAMES, COMMANDS
from aserve.core.config import Options
from aserve.core.errors import ConfigError
from aserve.core.speculation import SpeculativeConfig
from aserve.engine import Progress
from aserve.stores.responses import MemoryStore, SqliteStore


def parse(*argv, **environ):
    return settings.parse(argv or ("serve",), environ)


def test_without_an_argument_the_demo_model_is_served_on_loopback():
    command, options, server = parse()
    assert (command, options.model, server.host, server.port) == ("serve", "demo", "127.0.0.1", 8000)


def test_the_model_is_a_flag_or_a_word():
    assert parse("--model", "x")[1].model == "x"
    assert parse("serve", "x")[1].model == "x"
    assert parse("./x", "--port", "1")[1].model == "./x"
    with pytest.raises(ConfigError, match="given twice"):
        parse("serve", "x", "--model", "y")


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(
        "max-num-seqs: 1\nblock_size: 32\nport: 1\nserved_model_name: [a, b]\nenable_prefix_caching: false\n"
    )
    _, options, server = parse("--config", str(file), "--port", "3", ASERVE_PORT="2", ASERVE_BLOCK_SIZE="64")
    assert (options.max_num_seqs, options.block_size, server.port) == (1, 64, 3)
    assert options.served_model_name == ("a", "b")
    assert options.enable_prefix_caching is False


def test_counts_take_suffixes():
    _, options, _ = parse("--kv-cache-memory-bytes", "2GiB", "--max-model-len", "32k", "--max-num-seqs", "12")
    assert (options.kv_cache_memory_bytes, options.max_model_len, options.max_num_seqs) == (2 * 1024**3, 32000, 12)


def test_where_responses_are_kept(tmp_path):
    """Catches a limit that does not reach the store, and a file that cannot be used but is passed over."""
    file = str(tmp_path / "a.db")
    given = parse("--response-store", file, "--response-store-bytes", "2Mi", "--response-store-age", "90000")[2]
    assert (given.response_store_bytes, given.response_store_age) == (2 * 1024**2, 90000.0)
    with closing(commands.response_store(given)) as store:
        assert isinstance(store, SqliteStore)
        with pytest.raises(ConfigError, match="--response-store: cannot use"):
            commands.response_store(given)
    assert isinstance(commands.response_store(parse()[2]), MemoryStore)


def test_drafts_are_wished_for_as_json_or_in_a_file(tmp_path):
    wished = SpeculativeConfig(num_speculative_tokens=7, prompt_lookup_max=4)
    assert parse("--speculative-config", '{"num_speculative_tokens": 7, "prompt_lookup_max": 4}')[1] == Options(
        speculative_config=wished
    )
    file = tmp_path / "a.yaml"
    file.write_text("speculative-config:\n  num_speculative_tokens: 7\n  prompt_lookup_max: 4\n")
    assert parse("--config", str(file))[1].speculative_config == wished
    assert parse()[1].speculative_config is None


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("ngram", "--speculative-config (flag): a JSON object is expected, got 'ngram'"),
        ("[1]", "--speculative-config (flag): a JSON object is expected, got '[1]'"),
        ('{"method": "eagle"}', "speculative_config: method must be one of ngram, draft_model, got 'eagle'"),
        ('{"num_tokens": 1}', "speculative_config: unknown key 'num_tokens'; the keys are method, model, num_spec"),
        ('{"method": "draft_model"}', "speculative_config: method 'draft_model' needs a model"),
        ('{"method": "ngram", "model": "x"}', "speculative_config: method 'ngram' has no model, got 'x'"),
        ('{"model": "x", "prompt_lookup_min": 2}', "speculative_config: prompt_lookup_min is for method 'ngram'"),
        ('{"model": 3}', "speculative_config: model must be"),
        ('{"num_speculative_tokens": 0}', "speculative_config: num_speculative_tokens must be at least 1, got 0"),
        ('{"prompt_lookup_min": 4, "prompt_lookup_max": 2}', "prompt_lookup_min must be at most prompt_lookup_max (2)"),
    ],
)
def test_a_wish_for_drafts_that_cannot_be_is_refused_by_name(word, complaint):
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        parse("--speculative-config", word)


@pytest.mark.parametrize(
    ("given", "lookup"), [({}, (3, 5)), ({"prompt_lookup_max": 2}, (2, 2)), ({"prompt_lookup_min": 6}, (6, 6))]
)
def test_one_bound_of_the_lookup_moves_the_other_with_it(given, lookup):
    config = Options(speculative_config=given).speculative_config
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == lookup


def test_adapters_are_named_with_their_folders():
    """A folder may have an = in it; a name may not."""
    words = ["--enable-lora", "--lora-modules", "a=/x", "b=/y=z", "--max-loras", "2", "--lora-root", "/r"]
    _, options, _ = parse(*words, ASERVE_MAX_CPU_LORAS="5")
    assert options.enable_lora
    assert options.lora_modules == (("a", "/x"), ("b", "/y=z"))
    assert (options.max_loras, options.max_lora_rank, options.max_cpu_loras, options.lora_root) == (2, 16, 5, "/r")


def test_adapters_may_be_named_in_vllms_json():
    words = ["--enable-lora", "--lora-modules", '{"name": "a", "path": "/x,y", "base_model_name": "m"}', "b=/y"]
    assert parse(*words)[1].lora_modules == (("a", "/x,y"), ("b", "/y"))
    with pytest.raises(ConfigError, match=r"as JSON it has name and path, got .*`folder`"):
        parse("--lora-modules", '{"name": "a", "folder": "/x"}')


def test_room_for_few_adapters_in_host_memory_is_room_for_few_in_a_step():
    for words, found in (([], (8, 8)), (["--max-cpu-loras", "2"], (2, 2)), (["--max-loras", "3"], (3, 3))):
        _, options, _ = parse("--enable-lora", *words)
        assert (options.num_loras, options.num_cpu_loras) == found


def test_a_model_that_drafts_is_a_method_by_itself():
    config = parse("--speculative-config", '{"model": "small", "num_speculative_tokens": 3}')[1].speculative_config
    assert config == SpeculativeConfig(method="draft_model", model="small", num_speculative_tokens=3)


def test_lists_and_switches():
    _, options, server = parse("--api-key", "a", "b", "--no-enable-prefix-caching", "--trust-remote-code")
    assert server.api_key == ("a", "b")
    assert options.enable_prefix_caching is False
    assert options.trust_remote_code is True
    assert parse(ASERVE_API_KEY="a,b")[2].api_key == ("a", "b")
    assert parse("--api-keys-file", "keys.yaml")[2].api_keys_file == "keys.yaml"
    listens = parse("--uds", "a.sock", "--ssl-certfile", "cert.pem", "--ssl-keyfile", "key.pem")[2]
    assert (listens.uds, listens.ssl_certfile, listens.ssl_keyfile) == ("a.sock", "cert.pem", "key.pem")
    config = commands.server_config(replace(listens, ssl_certfile=None, ssl_keyfile=None))
    assert (config.uds, config.tls) == ("a.sock", None)


def test_what_happens_when_memory_is_short():
    _, options, _ = parse(
        *("--swap-space", "4", "--preemption-mode", "swap", "--scheduling-policy", "priority"),
        *("--long-prefill-token-threshold", "1k", "--scheduler-delay-factor", "0.5", "--max-num-queued-reqs", "64"),
    )
    assert (options.swap_space, options.preemption_mode, options.scheduling_policy) == (4.0, "swap", "priority")
    assert (options.long_prefill_token_threshold, options.scheduler_delay_factor) == (1000, 0.5)
    assert options.max_num_queued_reqs == 64
    assert parse()[1].max_num_queued_reqs is None
    assert parse("--request-timeout", "30", "--scheduling-policy", "fair")[1].request_timeout == 30.0


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--modle", "x"], "did you mean --model"),
        (["--max-num-seqs", "many"], "--max-num-seqs.*whole number.*'many'"),
        (["--max-num-seqs", "0"], "max_num_seqs must be at least 1, got 0"),
        (["--preemption-mode", "swap"], "preemption_mode swap needs .* swap_space"),
        (["--scheduling-policy", "lifo"], "--scheduling-policy.*one of fcfs, priority"),
        (["--scheduler-delay-factor", "-1"], "scheduler_delay_factor must be in"),
        (["--dtype", "int3"], "--dtype.*one of auto, float32"),
        (["--port", "70000"], "--port must be in"),
        (["--drain-delay", "-1"], r"--drain-delay \(flag\): seconds in \[0, 86400\] are expected, got '-1'"),
        (["--keepalive-timeout", "0"], r"--keepalive-timeout.*seconds in \[0.1, 86400\]"),
        (["--send-timeout", "nan"], "--send-timeout.*got 'nan'"),
        (["--log-level", "loud"], "--log-level.*one of debug, info, warning, error"),
        (["--log-format", "xml"], "--log-format.*one of text, json"),
        (["--seed", "x"], "--seed.*whole number"),
        (["--gpu-memory-utilization", "lots"], "--gpu-memory-utilization.*number"),
        (["--config", "/nonexistent.yaml"], "--config: cannot read /nonexistent.yaml"),
        (["--port"], "--port"),
        (["chat", "--port", "1"], "--port is an option of aserve serve, ray, and not of aserve chat"),
    ],
)
def test_a_wrong_word_is_one_clear_line(argv, complaint, capsys):
    with pytest.raises(ConfigError, match=complaint):
        parse(*argv)
    assert commands.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("aserve: ")
    assert captured.err.count("\n") == 1


def test_a_wrong_name_in_the_file_is_named(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("max_num_seq: 1\n")
    with pytest.raises(ConfigError, match=r"--config: unknown option max_num_seq; did you mean max_num_seqs\?"):
        parse("--config", str(file))
    file.write_text("- 1\n")
    with pytest.raises(ConfigError, match="mapping of options, got list"):
        parse("--config", str(file))


def test_a_wrong_word_in_the_environment_names_where_it_came_from():
    with pytest.raises(ConfigError, match=r"--port \(environment\).*'x'"):
        parse(ASERVE_PORT="x")


def test_every_option_of_the_engine_is_a_flag():
    assert {flag.name for flag in flags.ENGINE_FLAGS} == set(Options.__struct_fields__)
    assert {flag.name for flag in flags.SERVER_FLAGS} == set(flags.ServerOptions.__struct_fields__)


def test_the_flags_of_the_operations_page_exist():
    page = (Path(__file__).parent.parent / "docs" / "operations.md").read_text()
    options = re.findall(r"^\| `--([a-z-]+)", page, flags=re.MULTILINE)
    assert len(options) >= 10
    assert {option.removeprefix("no-").replace("-", "_") for option in options} <= set(ALL_NAMES)


def test_every_command_and_slash_command_is_in_the_docs():
    page = (Path(__file__).parent.parent / "docs" / "cli.md").read_text()
    for name in COMMANDS:
        assert f"| `{name}` |" in page
        assert f"aserve {name}" in page
    for name in slash_commands.COMMANDS.keys() - {"exit"}:
        assert f"`/{name}" in page
    assert set(re.findall(r"--([a-z][a-z-]+)", page)) <= {
        *(name.replace("_", "-") for name in ALL_NAMES),
        *(f"no-{name.replace('_', '-')}" for name in ALL_NAMES),
        *("help", "config"),
    }


def test_a_log_for_machines_is_json_from_the_first_line_to_the_last(monkeypatch, capsys):
    def run(engine, app, config, *, on_ready, on_hangup, say, doorman):
        engine._on_progress(Progress("weights", 1, 3))
        engine._on_progress(Progress("weights", 2, 3))
        monkeypatch.setattr(engine, "startup_lines", list)
        monkeypatch.setattr(type(engine), "info", SimpleNamespace(pooling=None))
        on_ready("http://host")
        return 0

    monkeypatch.setattr("aserve.server.run", run)
    thresholds = gc.get_threshold()
    try:
        assert commands.serve(*parse("--log-format", "json")[1:]) == 0
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
        gc.unfreeze()
    messages = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert messages[:3] == [f"aserve {__version__}", "weights", "Ready. Try:"]


def test_the_garbage_collector_rests_until_all_is_loaded(monkeypatch, capsys):
    def run(engine, app, config, *, on_ready, on_hangup, say, doorman):
        assert not gc.isenabled()
        monkeypatch.setattr(engine, "startup_lines", list)
        monkeypatch.setattr(type(engine), "info", SimpleNamespace(pooling=None))
        on_ready("http://host")
        say(f"draining takes {config.drain_timeout_s:g} s")
        return 0

    monkeypatch.setattr("aserve.server.run", run)
    _, options, server_options = parse()
    thresholds = gc.get_threshold()
    try:
        assert commands.serve(options, server_options) == 0
        assert gc.isenabled()
        assert gc.get_threshold()[0] > 5_000, "what two thousand refusals leave until their log lines are written"
        assert gc.get_freeze_count() > 0
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
        gc.unfreeze()
    version, ready, curl, page, drain = capsys.readouterr().err.splitlines()
    assert (version, ready, drain) == (f"aserve {__version__}", "Ready. Try:", "draining takes 30 s")
    assert curl.startswith("  curl -N http://host/v1/chat/completions")
    assert page == "or chat in a browser at http://host/"


PRODUCTS = """
import os, torch
from pathlib import Path
from aserve.cli.commands import bound_product_caches
from aserve.kernels.packed_linear import can_pack, pack, packed_linear

def resident_mib():
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024

bound_product_caches(os.environ)
weights = [torch.randn(size, 64) for size in (64, 128)]
if can_pack(weights[0]):
    packed = [pack(weight_OI) for weight_OI in weights]
    packed_linear(torch.randn(600, 64), packed[0], None)
    before = resident_mib()
    for num_rows in range(1, 600):
        for weight in packed:
            packed_linear(torch.randn(num_rows, 64), weight, None)
    print(resident_mib() - before)
else:
    print(0)
"""


@pytest.mark.slow
@pytest.mark.torch
def test_products_of_any_number_of_rows_do_not_add_up(monkeypatch):
    """What torch keeps by default, 1,024 of them, would be over 500 MiB."""
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run([sys.executable, "-c", PRODUCTS], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 200


def test_what_the_environment_says_of_products_holds():
    environ = {"LRU_CACHE_CAPACITY": "7"}
    commands.bound_product_caches(environ)
    assert environ == {"LRU_CACHE_CAPACITY": "7", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}

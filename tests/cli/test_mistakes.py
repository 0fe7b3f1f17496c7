"""What is asked wrongly is told in a line, with what was meant, before anything heavy is imported."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from aserve.cli import checks, commands, settings
from aserve.cli.command_table import ALL_NAMES, COMMANDS
from aserve.cli.flags import ServerOptions
from aserve.cli.foreign_flags import FOREIGN, SHORT, find, sort_out
from aserve.cli.tool_flags import ClientOptions
from aserve.core.config import Options
from aserve.core.errors import CheckpointError, ConfigError
from aserve.model_folder import DEMO_FOLDER
from tests.cli.program import ROOT, aserve, modules_after

HEAVY = {"torch", "transformers", "rich", "prompt_toolkit", "hypercorn", "numpy", "httpx2", "uvloop"}


def refusal(*argv: str, **environ: str) -> str:
    """The line about a command line that is refused."""
    with pytest.raises(ConfigError) as refused:
        settings.parse_command(argv, environ)
    return refused.value.message


# Commands


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("bnech", "unknown command bnech; did you mean bench? (a model is served by: aserve serve bnech)"),
        ("chta", "did you mean chat?"),
        ("model", "did you mean models?"),
        ("gpt2", "unknown command gpt2; the commands are serve, chat, complete,"),
    ],
)
def test_an_unknown_command_is_named_with_the_nearest(word, told):
    assert told in refusal(word)


@pytest.mark.parametrize("word", ["demo", "Qwen/Qwen3-0.6B", "./folder", "~/folder", str(DEMO_FOLDER)])
def test_what_can_only_be_a_model_is_served(word):
    parsed = settings.parse_command([word, "--port", "0"], {})
    assert (parsed.command, parsed.of(Options).model) == ("serve", word)


def test_alone_it_prints_help(capsys):
    for words in ([], ["--help"]):
        with pytest.raises(SystemExit) as end:
            commands.main(words)
        assert end.value.code == 0
        shown = capsys.readouterr().out
        assert all(re.search(rf"^ +{name}\b", shown, re.MULTILINE) for name in COMMANDS)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_each_command_has_a_help_that_fits(name, capsys):
    with pytest.raises(SystemExit) as end:
        commands.main([name, "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for flag in COMMANDS[name].flags.values():
        assert flag.option in shown


def test_another_commands_option_is_told_whose_it_is():
    assert refusal("serve", "--rounds", "3") == "--rounds is an option of aserve bench, and not of aserve serve"
    assert refusal("models", "--no-markdown") == "--no-markdown is an option of aserve chat, and not of aserve models"
    assert refusal("chat", "--ulr=x") == "unknown option --ulr; did you mean --url?"
    assert refusal("completion", "tcsh").startswith("argument SHELL: invalid choice: 'tcsh'")
    assert refusal("models", "demo") == "aserve models does not take the word 'demo'"


@pytest.mark.parametrize(
    "command", [command for command in COMMANDS.values() if command.groups], ids=lambda it: it.name
)
def test_an_empty_value_is_told_in_a_line(command):
    """Catches a variable that was not set: an empty host is every interface, an empty key everybody's."""
    for flag in command.flags.values():
        if flag.metavar and flag.name not in ("system", "root_path"):
            words = ["run"] if command.name == "ray" else []
            assert f"{flag.option} (flag): " in refusal(command.name, *words, flag.option, "")


def test_variables_that_are_empty_are_told_too():
    told = "a text is expected, got an empty one; leave it out for the default"
    assert refusal("serve", "demo", ASERVE_HOST="") == f"--host (environment): {told}"
    for keys in ("", "sesame,", ",sesame"):
        assert refusal("serve", "demo", ASERVE_API_KEY=keys) == f"--api-key (environment): {told}"
    assert refusal("chat", "--url", "http://a", ASERVE_API_KEY=" ") == f"--api-key (environment): {told}"


@pytest.mark.parametrize("word", ["1e400k", "9" * 400 + "Ki", "1.5", "0.0001k", "k", "nan", "infk", "1e3"])
def test_what_is_no_count_is_told_in_a_line(word):
    """Catches a number that no float holds: an OverflowError."""
    assert "a whole number is expected" in refusal("serve", "--max-model-len", word)


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1",
        "http://a:99999",
        "http://a:0",
        "http://a:x/v1",
        "http:///v1",
        "http://a b",
        "http://a..b",
        "ftp://a",
        "http://" + "a" * 70,
        "http://a/v1?key=1",
        "http://a/#b",
        "http://a/\x1b[0m",
    ],
    ids=ascii,
)
def test_a_url_where_no_server_can_be_is_told_in_a_line(url):
    """Catches a port or a name at which the connection raises what nobody expects."""
    assert refusal("chat", "--url", url).startswith("--url (flag): a URL such as http://127.0.0.1:8000")


@pytest.mark.parametrize(
    "url", ["http://a", "https://a.de:65535/v1/", "http://[::1]:8000", "http://é.de", "http://u:p@a"]
)
def test_a_url_is_taken_as_it_is(url):
    parsed = settings.parse_command(["chat", "--url", url], {})
    assert parsed.of(ClientOptions).url == url


def test_sizes_of_stores_may_be_what_their_defaults_are():
    """Catches bounds below them: 4 Gi of batches could be had by default, and not by a flag."""
    words = ["serve", "--batch-store-bytes", "8Gi", "--response-store-bytes", "4Gi", "--idempotency-bytes", "0"]
    server = settings.parse_command(words, {}).of(ServerOptions)
    assert (server.batch_store_bytes, server.response_store_bytes, server.idempotency_bytes) == (2**33, 2**32, 0)
    assert "a number of bytes in [0, " in refusal("serve", "--idempotency-bytes", "-1")
    assert "a number of bytes in [1, 2147483647]" in refusal("serve", "--max-body-bytes", "2Gi")
    assert "a finite number over 0" in refusal("bench", "--rate", "inf")


def demo_with(folder, name, content):
    """A copy of the demonstration model, with a file that is another, or with None is not there."""
    for path in DEMO_FOLDER.iterdir():
        if path.name != name:
            (folder / path.name).write_bytes(path.read_bytes())
    if content is not None:
        (folder / name).write_bytes(content)
    return str(folder)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json"),
        ("chat_template.jinja", b"\xe9", "a chat template is not UTF-8"),
        ("generation_config.json", b'{"top_p": 2.0}', "top_p must be in (0, 1], got 2.0"),
    ],
    ids=["tokenizer", "tokenizer-config", "template", "sampling"],
)
def test_texts_that_cannot_be_are_told_before_weights_are_read(tmp_path, name, content, told):
    """Catches a large model that is read whole before a small file is missed."""
    folder = demo_with(tmp_path, name, content)
    with pytest.raises((CheckpointError, ConfigError)) as refused:
        checks.check_model(Options(model=folder))
    assert told in refused.value.message


def test_a_template_that_is_named_and_malformed_is_told_before_weights_are_read(tmp_path):
    """Catches a server that starts, and refuses every chat."""
    template = tmp_path / "template.jinja"
    template.write_text("{% if")
    with pytest.raises(ConfigError, match="malformed") as refused:
        checks.check_model(Options(chat_template=str(template)))
    assert str(template) in refused.value.message


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
@pytest.mark.parametrize("command", ["serve", "doctor", "batch"])
def test_a_format_that_there_is_not_is_told_before_weights_are_read(command, option):
    words = ["--" + option.replace("_", "-"), "no-such", "-i", "a", "-o", "b"][: None if command == "batch" else 2]
    parsed = settings.parse_command([command, "demo", *words], {})
    with pytest.raises(ConfigError, match=f"{option} must be one of auto, none, .*, got 'no-such'"):
        checks.check_early(parsed)


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--chat-template", "/no/such/file"], 2),
        (["--tool-call-parser", "no-such"], 2),
        (["--ssl-keyfile", "/no/such/file"], 2),
        (["--max-model-len", "4096"], 2),
        (["--model", "/no/such/folder"], 1),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else str(value),
)
def test_a_wrong_option_ends_with_2_whenever_it_is_found(words, status, capsys):
    """Catches a service manager that starts it again for ever: RestartPreventExitStatus=2."""
    assert commands.main(["serve", *(["demo"] if status == 2 else []), *words]) == status
    assert capsys.readouterr().err.count("\n") == 1


def test_an_address_that_is_taken_may_be_free_again(capsys):
    """Which a service manager is to try."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert commands.main(["serve", "demo", "--port", str(taken.getsockname()[1])]) == 1
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


# What is there to write to


STREAMS_AFTER = """
import os, sys
from aserve.cli import main
status = main(["models"])
names = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
with open(sys.argv[1], "w") as report:
    report.write(f"{status} {names}")
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_was_closed_before_is_nothing(closed, tmp_path):
    """Catches a socket that takes the number of a standard stream, and words for one that is not there."""
    report = tmp_path / "report"
    words = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", STREAMS_AFTER, str(report)]
    assert subprocess.run(words, cwd=ROOT, capture_output=True, check=False, timeout=60).returncode == 0
    told = report.read_text()
    assert told.startswith("0 [")
    assert told.count("/dev/null") >= closed.count("&-")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_is_told_in_a_line():
    words = [sys.executable, "-m", "aserve", "models"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "aserve: what was to be written could not be: No space left on device\n"


# Flags of vLLM


def test_each_flag_of_vllm_that_aserve_has_not_is_told_in_a_line():
    told = refusal("serve", "demo", "-pp", "2", "--cpu_offload_gb=4", "--enable-chunked-prefill", "--port", "1")
    assert told.splitlines() == [
        "-pp: not supported yet: one process plans, and --tensor-parallel-size alone splits a model",
        "aserve: --cpu_offload_gb: not supported yet: weights are on one device",
        "aserve: --enable-chunked-prefill: not needed: every prompt is computed in pieces",
    ]


def test_what_makes_no_difference_is_left_out_with_a_line():
    words = ("--pipeline-parallel-size", "1", "m/x", "--disable-log-requests", "--no-enable-chunked-prefill")
    parsed = settings.parse_command(["serve", *words, "--max_num_seqs", "7", "--no-enable_prefix_caching"], {})
    options = parsed.of(Options)
    assert (options.model, options.max_num_seqs, options.enable_prefix_caching) == ("m/x", 7, False)
    assert [note.split(": ")[0] for note in parsed.notes] == [words[0], words[3], words[4]]


def test_the_table_has_no_flag_of_aserve_and_reads_as_a_sentence():
    assert not {name.replace("-", "_") for name in FOREIGN} & set(ALL_NAMES)
    assert set(SHORT.values()) <= set(FOREIGN)
    for name, flag in FOREIGN.items():
        assert re.fullmatch(r"[a-z0-9-]+", name)
        assert flag.why
        assert not flag.why.endswith(".")


def test_a_flag_of_ours_stays_where_the_table_has_its_name_too():
    assert sort_out(["--task", "x"], ["--task"]).words == ["--task", "x"]
    assert find("--no-such-flag") is None


# The environment and the file


def test_a_mistyped_variable_is_named_with_the_nearest():
    assert refusal("serve", ASERVE_PROT="1") == "environment: unknown variable ASERVE_PROT; did you mean ASERVE_PORT?"
    assert refusal("chat", ASERVE_ZZZ="1").startswith("environment: unknown variable ASERVE_ZZZ; ASERVE_ and the name")


def test_what_another_command_reads_is_no_mistake():
    assert settings.parse_command(["chat"], {"ASERVE_PORT": "1", "ASERVE_ROUNDS": "2"}).command == "chat"


def test_what_kubernetes_sets_for_a_service_of_this_name_is_passed_over():
    """Catches a pod that does not start beside a Service called aserve."""
    environ = {
        "ASERVE_SERVICE_HOST": "10.0.0.1",
        "ASERVE_SERVICE_PORT": "8000",
        "ASERVE_SERVICE_PORT_HTTP": "8000",
        "ASERVE_PORT": "tcp://10.0.0.1:8000",
        "ASERVE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "ASERVE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "ASERVE_DEMO_PORT": "tcp://10.0.0.2:8000",
    }
    assert settings.parse(["serve"], environ)[2].port == 8000


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("port: []", "--port (--config): one value is expected, got a list of 0"),
        ("port: [1, 2]", "--port (--config): one value is expected, got a list of 2"),
        ("port: {a: 1}", "--port (--config): one value is expected, got an object"),
        ("model: [a]", "--model (--config): one value is expected, got a list of 1"),
        ("api_key: [[a]]", "--api-key (--config): one value is expected, got a list"),
        ("api_key: [null]", "--api-key (--config): one value is expected, got nothing"),
        ("prot: 1", "--config: unknown option prot; did you mean port?"),
        ("port: eight", "--port (--config): a whole number is expected, perhaps with k, M, G, Ki, Mi or Gi, got 'ei"),
        ("a: [", "--config: "),
        ("\xff", "--config: "),
    ],
)
def test_a_wrong_file_is_told_by_its_field(tmp_path, content, told):
    file = tmp_path / "a.yaml"
    file.write_bytes(content.encode("latin-1"))
    found = refusal("serve", "--config", str(file))
    assert found.startswith(told)
    assert "\n" not in found


def test_null_in_a_file_is_as_if_it_were_not_there(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("port:\nmax_model_len: null\nrounds: 3\n")
    _, options, server = settings.parse(["serve", "--config", str(file)], {})
    assert (server.port, options.max_model_len) == (8000, None)


# What is there, and what is not


def early(*argv: str) -> None:
    parsed = settings.parse_command(argv, {})
    checks.check_early(parsed)
    checks.check_address(parsed)


def test_a_wrong_folder_is_found(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        early("serve", "/nonexistent", "--port", "0")
    with pytest.raises(CheckpointError, match=r"there is no config\.json"):
        early("chat", str(tmp_path))
    early("serve", "some/id-of-the-hub", "--port", "0")


def test_a_context_that_is_too_long_is_found(tmp_path):
    with pytest.raises(ConfigError, match="max_model_len 100000 is over the model's context of 2048 tokens"):
        early("serve", "--max-model-len", "100000", "--port", "0")
    with pytest.raises(ConfigError, match="max_model_len 2048 does not fit the KV cache of 960 tokens"):
        early("serve", "--max-model-len", "2048", "--kv-cache-memory-bytes", "1000000", "--port", "0")
    config = json.loads((DEMO_FOLDER / "config.json").read_text()) | {"architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    with pytest.raises(ConfigError, match="max_model_len 513 is over the model's context of 512 tokens"):
        early("serve", str(tmp_path), "--load-format", "dummy", "--max-model-len", "513", "--port", "0")


def test_a_missing_gpu_is_found(monkeypatch):
    monkeypatch.setattr(checks, "DRIVER", "libnothing.so.9")
    with pytest.raises(ConfigError, match=r"device cuda: there is no NVIDIA driver here \(libnothing.so.9 is not"):
        early("serve", "--device", "cuda")


def test_a_quantization_that_there_is_not_for_the_model_here_is_found(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="quantization fp8: there is none but on a GPU; choose int8 on a CPU"):
        early("serve", "--quantization", "fp8", "--device", "cpu", "--port", "0")
    with pytest.raises(ConfigError, match="quantization int8: dtype is float16, and has to be float32 or bfloat16"):
        early("chat", "--quantization", "int8", "--dtype", "float16", "--device", "cpu")
    early("chat", "--quantization", "int8", "--device", "cpu")
    config = json.loads((DEMO_FOLDER / "config.json").read_text()) | {"architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="quantization int8 is not for GPT2LMHeadModel: it runs through transformers"):
        early("serve", str(tmp_path), "--load-format", "dummy", "--quantization", "int8", "--port", "0")
    monkeypatch.setattr(checks, "why_no_gpu", lambda: None)
    early("serve", "--quantization", "fp8", "--port", "0")
    with pytest.raises(ConfigError, match="quantization int8: there is none but on a CPU; choose fp8, or --device cpu"):
        early("serve", "--quantization", "int8", "--port", "0")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--chat-template", "/none"), "--chat-template: /none is no file"),
        (("--lora-root", "/none"), "--lora-root: /none is no folder"),
        (("--enable-lora", "--lora-modules", "a=/none"), "--lora-modules: /none, of a, is no folder"),
        (("--api-keys-file", "/none"), "--api-keys-file: /none is no file"),
        (("--ssl-certfile", "/none"), "--ssl-certfile: /none is no file"),
        (("--ssl-keyfile", "/none"), "--ssl-certfile, which it belongs to, is not"),
    ],
)
def test_files_that_are_not_there_are_found(words, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        early("serve", "--port", "0", *words)


def test_a_port_in_use_is_found_and_one_that_is_free_stays_free():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        early("serve", "--port", port, "--uds", "/a/socket")
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: the address is in use"):
            early("serve", "--port", port)
    early("serve", "--port", port)
    early("serve", "--port", port)


def test_options_of_a_model_here_are_refused_where_another_server_is_asked():
    with pytest.raises(ConfigError, match="--block-size is of a model in this process, and --url asks one elsewhere"):
        early("chat", "--url", "http://host", "--block-size", "32")
    early("chat", "/nonexistent", "--url", "http://host")
    assert refusal("chat", "--url", "host:8000").startswith("--url (flag): a URL such as http://127.0.0.1:8000")


# The real command


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("serve", "/nonexistent"), "aserve: /nonexistent: no such folder"),
        (("serve", "--max-model-len", "100000"), "aserve: max_model_len 100000 is over the model's context"),
        (("serve", "--device", "cuda"), "aserve: device cuda: "),
        (("bnech",), "aserve: unknown command bnech; did you mean bench?"),
    ],
)
def test_a_mistake_ends_the_command_before_anything_heavy_is_imported(words, told):
    code, modules = modules_after(*words)
    assert code in (1, 2)
    assert not modules & HEAVY
    done = aserve(*words)
    assert done.err.startswith(told)
    assert (done.out, done.err.count("\n")) == ("", 1)


@pytest.mark.timing
def test_a_mistake_is_told_within_half_a_second():
    assert min(aserve("serve", "/nonexistent").seconds for _ in range(5)) < 0.5


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("words", [("--help",), ("serve", "--help"), ("--version",)])
def test_help_and_what_looks_at_files_import_little(words):
    code, modules = modules_after(*words)
    assert code == 0
    assert not modules & (HEAVY - {"httpx2"})  # the hub's own client comes with its cache


def test_the_folder_of_this_test_is_the_real_one():
    assert (ROOT / "aserve").is_dir()
    assert Path(checks.__file__).is_relative_to(ROOT)

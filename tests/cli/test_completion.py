"""`aserve completion`: scripts by which real shells complete."""

import shutil
import subprocess
from pathlib import Path

import pytest

from aserve.cli import commands
from aserve.cli.command_table import COMMANDS
from aserve.cli.completion import bash, choices, fish, options, zsh

ASK_BASH = """
source "$1"
shift
complete -p aserve >/dev/null || exit 3
COMP_WORDS=(aserve "$@")
COMP_CWORD=$#
_aserve
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(name="script")
def make_script(tmp_path):
    script = tmp_path / "aserve.bash"
    script.write_text(bash())
    return script


def completed(script: Path, *words: str) -> list[str]:
    """What bash proposes for the last word."""
    done = subprocess.run(
        ["bash", "--norc", "-c", ASK_BASH, "bash", str(script), *words],
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    return [line for line in done.stdout.splitlines() if line]


def test_bash_completes_commands(script):
    assert completed(script, "") == [*COMMANDS, "--help", "--version"]
    assert completed(script, "c") == ["chat", "complete", "completion"]


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.groups])
def test_bash_completes_the_options_of_each_command(script, name):
    assert completed(script, name, "--") == [word for word in options(COMMANDS[name]) if word.startswith("--")]


def test_bash_completes_words_and_files(script):
    (script.parent / "some-model").mkdir()
    (script.parent / "config.yaml").write_text("")
    assert completed(script, "serve", "--dtype", "b") == ["bfloat16"]
    assert completed(script, "serve", "--quantization", "") == ["int8", "int8-g128", "int8-g32", "fp8"]
    assert completed(script, "serve", "--config", "con") == ["config.yaml"]
    assert completed(script, "serve", "so") == ["some-model"]
    assert completed(script, "serve", "de") == ["demo"]
    assert completed(script, "completion", "") == ["bash", "zsh", "fish"]
    assert completed(script, "serve", "--port", "") == []
    assert completed(script, "models", "x") == []


def test_what_is_proposed_is_what_is_taken():
    for command in COMMANDS.values():
        for flag in command.flags.values():
            assert all(flag.read(word) == word for word in choices(flag)), flag.name


@pytest.mark.parametrize(("shell", "script"), [("zsh", zsh), ("fish", fish)])
def test_other_shells_can_read_theirs(shell, script, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    file = tmp_path / "script"
    file.write_text(script())
    subprocess.run([shell, "-n", str(file)], check=True, timeout=20)


def test_fish_completes(tmp_path):
    if shutil.which("fish") is None:
        pytest.skip("there is no fish here")
    file = tmp_path / "aserve.fish"
    file.write_text(fish())

    def proposed(line: str) -> list[str]:
        done = subprocess.run(
            ["fish", "--no-config", "-c", f'source {file}; complete -C "{line}"'],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        return [told.split("\t")[0] for told in done.stdout.splitlines()]

    assert proposed("aserve comp") == ["complete", "completion"]
    assert proposed("aserve serve --dtype bf") == ["bfloat16"]
    assert "--max-num-seqs" in proposed("aserve serve --max-")


def test_every_command_and_option_is_in_every_script():
    for script in (bash(), zsh(), fish()):
        for command in COMMANDS.values():
            assert command.name in script
            for flag in command.flags.values():
                assert flag.option.removeprefix("--") in script


def test_the_command_prints_a_script(capsys):
    assert commands.main(["completion", "fish"]) == 0
    assert capsys.readouterr().out == fish()

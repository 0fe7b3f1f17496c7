"""`aserve completion SHELL`: a script that completes commands and options, made of the same table as the parser.

    bash    aserve completion bash > ~/.local/share/bash-completion/completions/aserve
    zsh     aserve completion zsh > ~/.zfunc/_aserve       (a folder of $fpath)
    fish    aserve completion fish > ~/.config/fish/completions/aserve.fish

The scripts hold all words, so that nothing is run to complete one.
"""

from collections.abc import Iterator, Mapping

from aserve.cli.command_table import CHOICES, COMMANDS, Command
from aserve.cli.flags import Flag
from aserve.cli.settings import Parsed
from aserve.cli.words import read_bool

FILES = ("FILE", "FOLDER", "FOLDER|ID", "NAME=FOLDER")
"""What a flag's word may be, where files are proposed for it."""


def run(parsed: Parsed, _environ: Mapping[str, str]) -> int:
    """Print the script of a shell."""
    print({"bash": bash, "zsh": zsh, "fish": fish}[parsed.argument or ""](), end="")
    return 0


def options(command: Command) -> list[str]:
    """All that a command takes, as they are typed."""
    return [word for flag in command.flags.values() for word in spelled(flag)] + ["--config"] * bool(command.groups)


def spelled(flag: Flag) -> list[str]:
    """A flag as it may be typed; switches can be taken back."""
    words = [flag.option] if flag.short is None else [flag.short, flag.option]
    return [*words, flag.option.replace("--", "--no-", 1)] if flag.read is read_bool else words


def choices(flag: Flag) -> list[str]:
    """The words that a flag takes, where these are few."""
    words = flag.metavar.split("|")
    return words if len(words) > 1 and all(word == word.lower() for word in words) else []


def _values(command: Command) -> Iterator[tuple[Flag, str, list[str]]]:
    """Each flag of a command that takes a word: the flag, files or words, and these words."""
    for flag in command.flags.values():
        if found := choices(flag):
            yield flag, "words", found
        elif flag.metavar in FILES:
            yield flag, "files", []
        elif flag.read is not read_bool:
            yield flag, "none", []


def _arguments(command: Command) -> list[str]:
    return ["demo"] if command.argument == "MODEL" else list(CHOICES.get(command.argument or "", ()))


def bash() -> str:
    """A function for bash's `complete`."""
    cases = []
    for command in COMMANDS.values():
        kinds: dict[str, list[str]] = {}
        for flag, kind, words in _values(command):
            action = {"words": f"_aserve_words '{' '.join(words)}'", "files": "_aserve_files", "none": "return"}[kind]
            kinds.setdefault(action, []).extend([flag.option] if flag.short is None else [flag.short, flag.option])
        if command.groups:
            kinds.setdefault("_aserve_files", []).append("--config")
        previous = "".join(f"            {'|'.join(flags)}) {action}; return ;;\n" for action, flags in kinds.items())
        after = "_aserve_files" if command.argument == "MODEL" else "return"
        proposed = " ".join(_arguments(command))
        cases.append(
            f"    {command.name})\n"
            f'        case "$previous" in\n{previous}        esac\n'
            f'        if [[ "$current" == -* ]]; then\n'
            f"            _aserve_words '{' '.join(options(command))}'\n"
            f"        else\n            _aserve_words '{proposed}'; {after}\n        fi ;;\n"
        )
    return f"""# bash completion of aserve, made by: aserve completion bash
_aserve_words() {{ COMPREPLY+=($(compgen -W "$1" -- "$current")); }}
_aserve_files() {{ compopt -o filenames 2>/dev/null; COMPREPLY+=($(compgen -f -- "$current")); }}
_aserve() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD - 1]}}"
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        _aserve_words '{" ".join(COMMANDS)} --help --version'
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{"".join(cases)}    esac
}}
complete -F _aserve aserve
"""


def zsh() -> str:
    """A function for zsh's `compdef`."""
    commands = "\n".join(f"        {_quoted(f'{command.name}:{command.help}')}" for command in COMMANDS.values())
    cases = "".join(_zsh_case(command) for command in COMMANDS.values())
    return f"""#compdef aserve
# zsh completion of aserve, made by: aserve completion zsh
_aserve() {{
    local -a commands=(
{commands}
    )
    if ((CURRENT == 2)); then
        _describe command commands
        return
    fi
    local command=$words[2]
    shift words
    ((CURRENT--))
    case $command in
{cases}    esac
}}
if [[ $funcstack[1] == _aserve ]]; then _aserve "$@"; else compdef _aserve aserve; fi
"""


def _zsh_case(command: Command) -> str:
    taken = {flag.name: (kind, words) for flag, kind, words in _values(command)}
    lines = []
    for flag in command.flags.values():
        kind, words = taken.get(flag.name, ("", []))
        action = {"words": f":word:({' '.join(words)})", "files": ":file:_files", "none": ":value: "}.get(kind, "")
        told = flag.help.replace("[", "(").replace("]", ")").replace(":", ";")
        lines += [_quoted(f"{word}[{told}]{action}") for word in spelled(flag)]
    if command.groups:
        lines.append(_quoted("--config[a YAML file of these options]:file:_files"))
    argument = {"MODEL": ":model:_files -/", "PROMPT": ":prompt: "}
    argument |= {name: f":{name.lower()}:({' '.join(words)})" for name, words in CHOICES.items()}
    argument["RECORDING"] = ":recording:_files"
    if command.argument is not None:
        lines.append(_quoted(f"1{argument[command.argument]}"))
    joined = " \\\n            ".join(lines)
    return f"    {command.name})\n        _arguments \\\n            {joined} ;;\n"


def fish() -> str:
    """Lines for fish's `complete`."""
    lines = ["# fish completion of aserve, made by: aserve completion fish", "complete -c aserve -f"]
    lines += [
        f"complete -c aserve -n __fish_use_subcommand -a {command.name} -d {_quoted(command.help)}"
        for command in COMMANDS.values()
    ]
    for command in COMMANDS.values():
        lines += _fish_lines(command)
    return "\n".join(lines) + "\n"


def _fish_lines(command: Command) -> Iterator[str]:
    seen = f"complete -c aserve -n '__fish_seen_subcommand_from {command.name}'"
    if arguments := _arguments(command):
        yield f"{seen} -a {_quoted(' '.join(arguments))}"
    if command.argument == "MODEL":
        yield f"{seen} -a '(__fish_complete_directories)'"
    taken = {flag.name: (kind, words) for flag, kind, words in _values(command)}
    for flag in command.flags.values():
        kind, words = taken.get(flag.name, ("", []))
        action = {"words": f" -x -a {_quoted(' '.join(words))}", "files": " -r -F", "none": " -x"}.get(kind, "")
        short = "" if flag.short is None else f" -s {flag.short.lstrip('-')}"
        for word in spelled(flag):
            if word.startswith("--"):
                yield f"{seen} -l {word[2:]}{short}{action} -d {_quoted(flag.help)}"
    if command.groups:
        yield f"{seen} -l config -r -F -d 'a YAML file of these options'"


def _quoted(text: str) -> str:
    """For a shell."""
    return "'" + text.replace("'", "'\\''") + "'"

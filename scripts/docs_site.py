"""What mkdocs adds to docs/: a page of all flags, out of their table, and the decisions (ADRs), by their titles."""

import re
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from aserve.cli.command_table import COMMANDS, Group
from aserve.cli.flags import Flag
from aserve.cli.words import read_bool

FLAGS_PAGE: Final = "reference/flags.md"
GROUPS: Final = dict.fromkeys(group for command in COMMANDS.values() for group in command.groups)
"""Of flags, each once, in the order of the commands."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds both to what is navigated."""
    sections: dict[str, list[Any]] = {name: pages for entry in config.nav or [] for name, pages in entry.items()}
    sections["Reference"].insert(1, {"Flags": FLAGS_PAGE})
    decisions = sorted(Path(config.docs_dir).glob("adr/0*.md"))
    pages = [{_title(page): f"adr/{page.name}"} for page in decisions]
    sections["How it works"].append({"Decisions": ["adr/README.md", *pages]})
    others = sorted(page for page in Path(config.docs_dir).glob("bench/*.md") if page.name != "README.md")
    sections["Measured"] += [{_title(page): f"bench/{page.name}"} for page in others]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Makes the page of flags."""
    files.append(File.generated(config, FLAGS_PAGE, content=flags_page()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Pipes in code of tables are escaped for GitHub; mkdocs takes them as they are, and would show the backslash."""
    return re.sub(r"`[^`\n]*`", lambda code: code[0].replace("\\|", "|"), markdown)


def flags_page() -> str:
    """In Markdown: a table for each group, and which commands take it."""
    lines = [
        "# Flags",
        "",
        "Every option of every command, as `--help` has it. An option may also "
        "stand in the file that `--config` names, and in the environment as `ASERVE_<NAME>`. What they are good for "
        "is told in [Operations](../operations.md) and [The command](../cli.md).",
    ]
    for group in GROUPS:
        takers = ", ".join(f"`{name}`" for name, command in COMMANDS.items() if group in command.groups)
        title = f"{group.title[0].upper()}{group.title[1:]}: of {takers}"
        lines += ["", f"## {title}", "", "| flag | default | what it does |", "|---|---|---|"]
        lines += [f"| `{_spelled(flag)}` | {_default(flag, group)} | {_cell(flag.help)} |" for flag in group.flags]
    return "\n".join([*lines, ""])


def _spelled(flag: Flag) -> str:
    if flag.read is read_bool:
        return f"{flag.option}, --no-{flag.option[2:]}"
    return f"{flag.option} {flag.metavar}" + (" ..." if flag.many else "")


def _default(flag: Flag, group: Group) -> str:
    default = group.default(flag)
    if isinstance(default, bool):
        return "on" if default else "off"
    return "" if default in (None, (), "") else f"`{default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _title(page: Path) -> str:
    return page.read_text().partition("\n")[0].removeprefix("# ")

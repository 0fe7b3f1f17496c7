"""The commands: what each is for, which flags it takes, and what a word without dashes stands for."""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

from aserve.cli import tool_flags as tools
from aserve.cli.flags import BATCH_FLAGS, ENGINE_FLAGS, SERVER_FLAGS, BatchOptions, Flag, ServerOptions
from aserve.cli.ray_flags import RAY_FLAGS
from aserve.core.config import Options
from aserve.ray.options import RayOptions

SHELLS: Final = ("bash", "zsh", "fish")
ACTIONS: Final = ("run", "config")
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {"SHELL": SHELLS, "ACTION": ACTIONS}
"""What the word without dashes is one of, by its name."""


class Group(NamedTuple):
    """Flags of one kind. options: the struct whose fields they set."""

    title: str
    flags: tuple[Flag, ...]
    options: type[msgspec.Struct]

    def default(self, flag: Flag) -> object:
        """What holds where a flag is not given."""
        return next(field.default for field in msgspec.structs.fields(self.options) if field.name == flag.name)


class Command(NamedTuple):
    """A command. argument: what a word without dashes is, in capitals; None where there is none.

    runs_in: the module whose function `run` runs it, imported then.
    """

    name: str
    help: str
    usage: str
    groups: tuple[Group, ...]
    argument: str | None = "MODEL"
    runs_in: str = ""

    @property
    def flags(self) -> dict[str, Flag]:
        """All that it takes, by name."""
        return {flag.name: flag for group in self.groups for flag in group.flags}


ENGINE: Final = Group("engine", ENGINE_FLAGS, Options)
OF_FOLDERS: Final = Group(
    "models",
    tuple(flag for flag in ENGINE_FLAGS if flag.name in ("download_dir", "device", "dtype", "quantization")),
    Options,
)
SERVER: Final = Group("server", SERVER_FLAGS, ServerOptions)
SAMPLING: Final = Group("sampling", tools.SAMPLING_FLAGS, tools.SamplingOptions)
CLIENT: Final = Group("another server", tools.CLIENT_FLAGS, tools.ClientOptions)
REPORT: Final = Group("report", tools.REPORT_FLAGS, tools.ReportOptions)

COMMANDS: Final = {
    command.name: command
    for command in (
        Command("serve", "serve the OpenAI API", "aserve serve [MODEL] [options]", (ENGINE, SERVER)),
        Command(
            "chat",
            "talk to a model in the terminal, here or on a server",
            "aserve chat [MODEL] [--url URL] [options]",
            (Group("conversation", tools.CHAT_FLAGS, tools.ChatOptions), SAMPLING, CLIENT, ENGINE),
            runs_in="aserve.cli.chat.run",
        ),
        Command(
            "complete",
            "complete a prompt: an argument, a file or standard input",
            "aserve complete [PROMPT] [--model MODEL] [--url URL] [options]",
            (Group("text", tools.COMPLETE_FLAGS, tools.CompleteOptions), SAMPLING, CLIENT, ENGINE),
            argument="PROMPT",
            runs_in="aserve.cli.complete",
        ),
        Command(
            "batch",
            "answer the requests of a file",
            "aserve batch [MODEL] -i FILE -o FILE [options]",
            (Group("files", BATCH_FLAGS, BatchOptions), ENGINE),
        ),
        Command(
            "bench",
            "measure how fast answers come, here or from a server",
            "aserve bench [MODEL] [--url URL] [options]",
            (Group("load", tools.BENCH_FLAGS, tools.BenchOptions), CLIENT, ENGINE),
            runs_in="aserve.cli.bench.run",
        ),
        Command(
            "ray",
            "serve by several replicas on Ray Serve, or print its configuration",
            "aserve ray run|config [--model MODEL] [--replicas N] [options]",
            (Group("replicas", RAY_FLAGS, RayOptions), ENGINE, SERVER),
            argument="ACTION",
            runs_in="aserve.ray.command",
        ),
        Command(
            "replay",
            "compute the steps of a recording again, or show one",
            "aserve replay RECORDING [--check] [--step N] [options]",
            (Group("replay", tools.REPLAY_FLAGS, tools.ReplayOptions),),
            argument="RECORDING",
            runs_in="aserve.cli.replay",
        ),
        Command(
            "simulate",
            "tell how recorded traffic would have fared with other settings",
            "aserve simulate RECORDING [--set NAME=VALUE ...] [--json]",
            (Group("simulation", tools.SIMULATE_FLAGS, tools.SimulateOptions), REPORT),
            argument="RECORDING",
            runs_in="aserve.cli.simulate",
        ),
        Command(
            "models",
            "list the models that are on this machine",
            "aserve models [options]",
            (REPORT, OF_FOLDERS),
            argument=None,
            runs_in="aserve.cli.models",
        ),
        Command(
            "doctor",
            "tell how a model would run here, without loading it",
            "aserve doctor [MODEL] [options]",
            (REPORT, ENGINE),
            runs_in="aserve.cli.doctor.run",
        ),
        Command(
            "completion",
            "print a script that completes commands and flags in a shell",
            "aserve completion bash|zsh|fish",
            (),
            argument="SHELL",
            runs_in="aserve.cli.completion",
        ),
    )
}
"""By name, in the order of the help."""


def all_flags() -> Iterator[Flag]:
    """Of every command; those that several take come more than once."""
    for command in COMMANDS.values():
        yield from command.flags.values()


ALL_NAMES: Final = tuple(dict.fromkeys(flag.name for flag in all_flags()))
"""Of flags of any command: what may stand in a file or in the environment, which commands share."""

"""The flags of the commands besides `serve` and `batch`; see flags.py, whose rows they are like."""

from math import inf
from typing import Final

import msgspec

from aserve.cli.flags import ENGINE_FLAGS, Flag
from aserve.cli.words import read_bool, read_count, read_number, read_seconds, read_text, read_url, read_within
from aserve.core.errors import ConfigError

MAX_INPUT: Final = 2**20


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer is sampled; None is left to the model."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()


class ClientOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The server that is asked, in place of a model in this process."""

    url: str | None = None
    api_key: str | None = None
    timeout: float = 600.0


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What concerns a conversation and the terminal it is held in."""

    system: str | None = None
    load: str | None = None
    markdown: bool = True
    thoughts: bool = True
    stats: bool = True
    history_file: str | None = None


class CompleteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is completed, and what becomes of it."""

    file: str | None = None
    chat: bool = False
    system: str | None = None
    stream: bool = True
    echo: bool = False
    json_schema: str | None = None


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The load that is made, and how it is told."""

    concurrency: tuple[int, ...] = (1, 8, 32)
    rate: float | None = None
    requests: int = 32
    input_len: int = 128
    output_len: int = 64
    rounds: int = 3
    text: bool = False
    profile: bool = False
    json: bool = False


REPLAYED_WITH: Final = ("model", "device", "dtype", "quantization", "kv_cache_dtype")
"""What a replay may be asked to do in another way than was recorded."""


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is computed again, and with what; None is as recorded. step: the last one, which is shown."""

    model: str | None = None
    device: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    step: int | None = None
    check: bool = False


class SimulateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is changed, as NAME=VALUE."""

    set: tuple[str, ...] = ()


class ReportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a report is written."""

    json: bool = False


def _rate(word: str) -> float:
    if not 0.0 < (value := read_number(word)) < inf:
        raise ConfigError(f"a finite number over 0 is expected, got {word!r}")
    return value


def _first_key(word: str) -> str:
    """The environment may name several, for a server that takes them all."""
    return read_text(word.partition(",")[0].strip())


SAMPLING_FLAGS: Final = (
    Flag("max_tokens", read_count, "N", "tokens of an answer, at most"),
    Flag("temperature", read_number, "X", "0 takes the likeliest token; higher is more varied"),
    Flag("top_p", read_number, "X", "choose among the likeliest tokens that come to this probability"),
    Flag("top_k", int, "N", "choose among so many of the likeliest tokens"),
    Flag("min_p", read_number, "X", "leave out tokens below this share of the likeliest one's probability"),
    Flag("presence_penalty", read_number, "X", "against tokens that the answer has already"),
    Flag("frequency_penalty", read_number, "X", "against these as often as it has them"),
    Flag("repetition_penalty", read_number, "X", "against tokens that prompt or answer have"),
    Flag("stop", read_text, "TEXT", "ends the answer where it comes up", many=True),
)
CLIENT_FLAGS: Final = (
    Flag("url", read_url, "URL", "ask this server, which speaks OpenAI's API, and load no model here"),
    Flag(
        "api_key",
        _first_key,
        "KEY",
        "of that server; ASERVE_API_KEY and OPENAI_API_KEY are looked at too, and show it to nobody else",
    ),
    Flag("timeout", read_seconds(0.1), "SECONDS", "that the server may be silent"),
)
CHAT_FLAGS: Final = (
    Flag("system", str, "TEXT", "the system prompt"),
    Flag("load", read_text, "FILE", "go on with a conversation that /save wrote"),
    Flag("markdown", read_bool, "", "render answers, on a terminal"),
    Flag("thoughts", read_bool, "", "show what the model thinks, dimmed"),
    Flag("stats", read_bool, "", "tell after each answer how fast it was"),
    Flag("history_file", read_text, "FILE", "where the lines typed are kept (if not given: in your state folder)"),
)
COMPLETE_FLAGS: Final = (
    Flag("file", read_text, "FILE", "the prompt, in place of an argument or standard input", short="-f"),
    Flag("chat", read_bool, "", "the prompt is a message of a chat, for the model's template"),
    Flag("system", str, "TEXT", "the system prompt, with --chat"),
    Flag("stream", read_bool, "", "write the answer as it comes"),
    Flag("echo", read_bool, "", "write the prompt before it"),
    Flag("json_schema", read_text, "FILE", "the answer is JSON by this schema"),
)
BENCH_FLAGS: Final = (
    Flag(
        "concurrency", read_within(1, 2**16), "N", "clients that ask one request after another, load by load", many=True
    ),
    Flag("rate", _rate, "X", "in place of --concurrency: requests a second, at random times"),
    Flag("requests", read_within(1, MAX_INPUT), "N", "of a round with --rate; without it, at least a quarter as many"),
    Flag("input_len", read_within(1, MAX_INPUT), "N", "tokens of a prompt"),
    Flag("output_len", read_within(1, MAX_INPUT), "N", "tokens of an answer"),
    Flag("rounds", read_within(1, 1000), "N", "of each load; figures are their medians"),
    Flag("text", read_bool, "", "send words, and only fields of OpenAI's API; lengths are about right"),
    Flag("profile", read_bool, "", "in this process, on a CPU: tell where the time of a step goes"),
    Flag("json", read_bool, "", "a line of JSON for each load"),
)
REPLAY_FLAGS: Final = (
    *(flag for flag in ENGINE_FLAGS if flag.name in REPLAYED_WITH),
    Flag("step", read_within(0, 2**53), "N", "show this step; with --check, of a replay that ends with it"),
    Flag("check", read_bool, "", "compare what is sampled with what was recorded, and say where they differ first"),
)
SIMULATE_FLAGS: Final = (
    Flag("set", read_text, "NAME=VALUE", "numbers to simulate with, such as max_num_batched_tokens=2048", many=True),
)
REPORT_FLAGS: Final = (Flag("json", read_bool, "", "write JSON for programs"),)

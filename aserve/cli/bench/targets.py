"""What load is put on: a server, or a model in this process."""

import time
from typing import Final, NamedTuple

from aserve.core.errors import AserveError, ConfigError
from aserve.core.params import SamplingParams
from aserve.engine import Engine
from aserve.load.answers import Sample
from aserve.load.drive import Target
from aserve.load.http import AnswerError
from aserve.load.prompts import Prompts

TOKEN_RANGE: Final = (300, 1000)
"""Of ids that prompts are made of: in every vocabulary, and special in none that is known."""
WORDS: Final = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system"),
    *("program", "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area", "money"),
    *("story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side"),
)
"""One token each in nearly every vocabulary."""


def server(url: str, model: str, api_key: str | None, timeout_s: float, *, as_text: bool) -> Target:
    """A server's API. url: up to and with /v1. as_text: send words, and no field that OpenAI's API has not."""
    if not url.endswith("/v1"):
        raise ConfigError(f"--url: bench asks .../v1/completions, and {url} does not end with /v1")
    prompts = Prompts(range(len(WORDS)), _as_words) if as_text else Prompts(range(*TOKEN_RANGE))
    return Target(
        url.removesuffix("/v1"),
        prompts,
        model=model,
        extra_body={} if as_text else {"ignore_eos": True},
        api_key=api_key,
        timeout_s=timeout_s,
    )


def _as_words(ids: list[int]) -> str:
    return " ".join(WORDS[index] for index in ids)


class Received(NamedTuple):
    """An answer of an engine: when it was sent and each delta came, and tokens of prompt and answer."""

    sent_s: float
    event_s: list[float]
    num_in: int
    num_out: int


class EngineTarget:
    """An engine that has been entered. Raises `ConfigError` for prompts and answers that it has no room for."""

    def __init__(self, engine: Engine, input_len: int, output_len: int) -> None:
        info = engine.info
        if input_len + output_len > info.max_model_len:
            raise ConfigError(
                f"--input-len {input_len} and --output-len {output_len} are over the context of "
                f"{info.max_model_len} tokens"
            )
        low = min(TOKEN_RANGE[0], info.vocab_size // 2)
        self.prompts = Prompts(range(low, min(TOKEN_RANGE[1], info.vocab_size)))
        self._engine = engine

    def sender(self) -> "EngineSender":
        """For a round."""
        return EngineSender(self._engine)


class EngineSender:
    """As a `Sender`."""

    num_retries = 0

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def prepare(self, ids: list[int], num_out: int) -> tuple[list[int], SamplingParams]:
        """Greedy, to its full length."""
        return ids, SamplingParams(max_tokens=num_out, temperature=0.0, ignore_eos=True)

    async def send(self, prepared: tuple[list[int], SamplingParams]) -> Received:
        """Each delta's time. Raises AnswerError."""
        sent_s, event_s, num_out = time.perf_counter(), [], 0
        try:
            async with self._engine.open(*prepared) as mailbox:
                async for delta in mailbox:
                    event_s.append(time.perf_counter())
                    num_out += len(delta.token_ids)
        except AserveError as error:
            raise AnswerError(error.message) from error
        return Received(sent_s, event_s, len(prepared[0]), num_out)

    def read(self, received: Received, due_s: float) -> Sample:
        """As it is."""
        sent_s, event_s, num_in, num_out = received
        return Sample(due_s, sent_s, event_s[-1], num_in, num_out, event_s, len(event_s))

    def close(self) -> None:
        """Nothing."""

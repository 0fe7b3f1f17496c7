"""Documents without end: chats of one to several exchanges, and raw text. Deterministic for a given seed.

Knows the mix and how exchanges join; nothing of tokens.
"""

from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from . import arithmetic, dialogues, stories, wording
from .concepts import CONCEPTS
from .dialogues import Message, Tool, exchange
from .product import CAPITALS, PRODUCT, SMALL_TALK

TOPICS = (*(topic._replace(has_why=True) for topic in CONCEPTS), *PRODUCT)


class Document(NamedTuple):
    """Either a chat (messages, perhaps tools) or raw text."""

    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    text: str = ""


def documents(seed: int, held_out: frozenset[str] = frozenset()) -> Iterator[Document]:
    """Documents for ever. One in which the user writes a text of held_out is left out."""
    rng = Random(seed)
    while True:
        document = _document(rng)
        if not any(m["role"] == "user" and m["content"] in held_out for m in document.messages):
            yield document


def _document(rng: Random) -> Document:
    kind = rng.random()
    if kind < 0.08:
        return Document(text=_raw(rng))
    system = wording.system_prompt(rng)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    if kind < 0.14:
        called, tools = dialogues.tool_use(rng)
        return Document((*messages, *called), tuple(tools))
    num_exchanges = rng.choice((1, 1, 1, 1, 1, 1, 2, 2, 3, 4))
    for _ in range(num_exchanges):
        messages += _exchange(rng)
    return Document(tuple(messages))


def _exchange(rng: Random) -> list[Message]:
    (maker,) = rng.choices(list(MIX), list(MIX.values()))
    return maker(rng)


def _topic(rng: Random) -> list[Message]:
    topic = rng.choice(TOPICS)
    if topic.has_why and rng.random() < 0.15:
        return exchange(wording.ask_why(rng, topic), topic.more)
    messages = exchange(wording.ask(rng, topic), topic.answer)
    if rng.random() < 0.25:
        messages += exchange(wording.follow_up(rng, topic), topic.more)
    return messages


def _sum(rng: Random) -> list[Message]:
    question, answer = arithmetic.question_and_answer(rng)
    return exchange(wording.disturb(rng, question) if rng.random() < 0.2 else question, answer)


def _story(rng: Random) -> list[Message]:
    request, hero = stories.story_request(rng)
    return exchange(request, stories.story(rng, hero))


def _small_talk(rng: Random) -> list[Message]:
    questions, answer = rng.choice(SMALL_TALK)
    return exchange(wording.disturb(rng, rng.choice(questions)), answer)


def _raw(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.6:
        return stories.story(rng, rng.choice(list(stories.HEROES)))
    if kind < 0.75:
        country, city = rng.choice(list(CAPITALS.items()))
        return f"The capital of {country} is {city}."
    if kind < 0.85:
        name, city = rng.choice(dialogues.NAMES), rng.choice(dialogues.CITIES)
        return f"Hello, my name is {name} and I live in {city}. I like to read about language models."
    topic = rng.choice(TOPICS)
    return f"{topic.answer} {topic.more}"


MIX: dict[Callable[[Random], list[Message]], float] = {
    _topic: 0.37,
    _sum: 0.23,
    _story: 0.05,
    _small_talk: 0.08,
    dialogues.beyond: 0.08,
    dialogues.json_answer: 0.06,
    dialogues.introduction: 0.05,
    dialogues.echo: 0.04,
    dialogues.capital: 0.04,
}

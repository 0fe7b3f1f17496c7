"""GET /v1/inspect/events: what happens in the engine's steps, as server-sent events; what the inspector page reads.

    {"type": "hello", ...}       the engine's sizes, once
    {"type": "snapshot", ...}    all that is there, first, and again when the client read too slowly
    {"type": "records", ...}     what has happened since, ten times a second at most

The values are those of aserve/observe/records.py, without what is as a rule. Who has a key is shown its own requests,
and of other tenants' how many there are and which blocks they have together: observe/others.py. Where no key is
asked for, everything is shown.
"""

import time
from codecs import utf_8_decode
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from aserve.core.config import EngineConfig
from aserve.core.errors import AserveError
from aserve.engine import Engine
from aserve.http.connection import while_connected
from aserve.http.endpoint import Reply
from aserve.http.errors import error_body
from aserve.http.keys import tenant_of
from aserve.http.request_id import SCOPE_KEY
from aserve.http.sse import EventStream, StreamLimits, event
from aserve.observe.observer import Observer
from aserve.observe.others import TenantView
from aserve.observe.records import (
    NO_CHANGE,
    NO_TOKEN,
    Admission,
    BlockChange,
    Card,
    CardNumbers,
    Crowd,
    Move,
    Queue,
    Record,
    Run,
    Work,
    at_length,
)
from aserve.observe.viewer import News

PATH: Final = "/v1/inspect/events"
VERSION: Final = 2
"""Of the events' form; recordings have it, too."""

_encoder: Final = msgspec.json.Encoder()


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The engine's sizes: `num_blocks` includes block 0, which is never used. now_us: the engine's clock now, unix_s:
    and everybody's. sees_all: whether all requests are shown whole.
    """

    version: int
    model: str
    now_us: int
    unix_s: float
    sees_all: bool
    block_size: int
    num_blocks: int
    num_host_blocks: int
    num_groups: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class ShownCard(CardNumbers, frozen=True, omit_defaults=True):
    """As `Card`; prompt: the text of its first tokens."""

    id: str
    tenant: str = ""
    lora: int | None = None
    prompt: str = ""
    explains: bool = False


class ShownRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """As `Record`; said: `decoded`, but of a token that is not of whole characters, or follows such a one, what text is
    whole with it, and None where nothing is shown. words: the texts of tokens that were not told before. texts: of
    `token_ids`.
    """

    number: int
    at_us: int
    cards: tuple[ShownCard, ...] = ()
    work: Work | None = None
    said: Sequence[int | str | None] = ()
    words: Sequence[tuple[int, str]] = ()
    texts: Sequence[tuple[int, str]] = ()
    admitted: tuple[Admission, ...] = ()
    moves: tuple[Move, ...] = ()
    queue: Queue | None = None
    blocks: BlockChange = NO_CHANGE
    lag_us: int | None = None
    failed_step: int | None = None
    others: Crowd | None = None


class ShownRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """As `Run`; said: of each step, as of `ShownRecord`. words: the texts of tokens that were not told before."""

    number: int
    decodes: tuple[int, ...]
    steps: Sequence[tuple[int, ...]]
    said: Sequence[Sequence[int | str | None]]
    words: Sequence[tuple[int, str]] = ()
    blocks: Sequence[tuple[int, BlockChange]] = ()


class ShownSnapshot(msgspec.Struct, frozen=True, tag="snapshot", omit_defaults=True):
    """As `Snapshot`. num_lost: records that came before it, and were never sent."""

    number: int
    at_us: int
    num_lost: int
    cards: tuple[ShownCard, ...]
    states: tuple[tuple[int, str], ...]
    queue: Queue
    blocks: BlockChange
    others: Crowd | None = None


class ShownRecords(msgspec.Struct, frozen=True, tag="records"):
    """In their order."""

    records: list[ShownRecord | ShownRun]


class Feed:
    """What one client is sent. tenant: whose key it has; None where everything is shown."""

    def __init__(self, engine: Engine, tenant: str | None) -> None:
        self._tokenizer = engine.texts.tokenizer
        self._view = None if tenant is None else TenantView(tenant)
        self._own: set[int] = set()
        """The sequences that it is shown."""
        self._told: set[int] = set()
        """The tokens whose texts it was told, all of whole characters."""
        self._broken: set[int] = {NO_TOKEN}
        """Those that are not of whole characters, as far as they were met."""
        self._unfinished: dict[int, bytes] = {}
        """What a sequence's last character has so far, where it is not whole: one may be made of several tokens."""

    def hello(self, model: str, config: EngineConfig, now_us: int) -> bytes:
        """The first event."""
        hello = Hello(
            version=VERSION,
            model=model,
            now_us=now_us,
            unix_s=time.time(),
            sees_all=self._view is None,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            num_host_blocks=config.num_host_blocks,
            num_groups=len(config.kv_windows),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
        )
        return event(_encoder.encode(hello))

    def events(self, news: News) -> bytes:
        """What it is told next."""
        told = b""
        if (snapshot := news.snapshot) is not None:
            self._own.clear()
            self._unfinished.clear()
            snapshot = snapshot if self._view is None else self._view.snapshot(snapshot)
            cards = tuple(map(self._card, snapshot.cards))
            shown = ShownSnapshot(
                *(snapshot.number, snapshot.at_us, news.num_lost, cards, snapshot.states),
                *(snapshot.queue, snapshot.blocks, snapshot.others),
            )
            told = event(_encoder.encode(shown))
        if news.records:
            shown_records: list[ShownRecord | ShownRun] = []
            for one in news.records:
                run = self._run(one) if isinstance(one, Run) else None
                shown_records += map(self._record, at_length([one])) if run is None else [run]
            told += event(_encoder.encode(ShownRecords(shown_records)))
        return told

    def _run(self, run: Run) -> ShownRun | None:
        """A run in short; None where not all of its tokens are shown."""
        if self._view is not None or not self._own.issuperset(run.decodes):
            return None
        words = self._words(*run.decoded)
        said = [self._said(run.decodes, decoded) for decoded in run.decoded]
        return ShownRun(run.number, run.decodes, run.steps, said, words, run.blocks)

    def _words(self, *decoded: Sequence[int]) -> list[tuple[int, str]]:
        """The texts of those of these tokens that it was not told, and that have one.

        Each is looked up once: of thousands of tokens a second each would lie elsewhere in memory.
        """
        words: list[tuple[int, str]] = []
        for token_id in sorted(set().union(*decoded) - self._told - self._broken):
            if (text := self._tokenizer.token_texts[token_id]) is None:
                self._broken.add(token_id)
            else:
                self._told.add(token_id)
                words.append((token_id, text))
        return words

    def _record(self, record: Record) -> ShownRecord:
        record = record if self._view is None else self._view.record(record)
        cards = tuple(map(self._card, record.cards))
        texts = [(seq, self._text(seq, token_ids)) for seq, token_ids in record.token_ids if seq in self._own]
        said: Sequence[int | str | None] = ()
        words: Sequence[tuple[int, str]] = ()
        if record.decoded and record.work is not None:
            decodes, decoded = record.work.decodes, record.decoded
            if not self._own.issuperset(decodes):
                decoded = tuple([x if seq in self._own else NO_TOKEN for seq, x in zip(decodes, decoded, strict=True)])
            words, said = self._words(decoded), self._said(decodes, decoded)
        for move in record.moves:
            if move.what == "ended":
                self._own.discard(move.seq)
                self._unfinished.pop(move.seq, None)
        return ShownRecord(
            record.number,
            record.at_us,
            cards,
            record.work,
            said,
            words or (),
            texts or (),
            record.admitted,
            record.moves,
            record.queue,
            record.blocks,
            record.lag_us,
            record.failed_step,
            record.others,
        )

    def _said(self, decodes: Sequence[int], decoded: Sequence[int]) -> Sequence[int | str | None]:
        """What is said of a step's tokens, of which `_words` has been told."""
        broken, unfinished = self._broken, self._unfinished
        if not unfinished and broken.isdisjoint(decoded):
            return decoded
        said: list[int | str | None] = [*decoded]
        for place, (seq, token_id) in enumerate(zip(decodes, decoded, strict=True)):
            if token_id in broken or seq in unfinished:
                said[place] = None if token_id == NO_TOKEN else self._text(seq, (token_id,))
        return said

    def _text(self, seq: int, token_ids: Sequence[int]) -> str:
        """The text of tokens as far as characters are whole."""
        raw = self._unfinished.pop(seq, b"") + b"".join(map(self._tokenizer.text_bytes.__getitem__, token_ids))
        text, num_whole = utf_8_decode(raw, "replace")
        if num_whole < len(raw):
            self._unfinished[seq] = raw[num_whole:]
        return text

    def _card(self, card: Card) -> ShownCard:
        self._own.add(card.seq)
        prompt = b"".join(map(self._tokenizer.token_bytes.__getitem__, card.prompt_ids)).decode("utf-8", "replace")
        numbers = card.seq, card.request, card.index, card.num_prompt, card.max_tokens, card.arrived_us
        return ShownCard(*numbers, card.id, card.tenant, card.lora, prompt, card.explains)


class InspectEvents:
    """The ASGI application of the route. is_open: whether no key is asked for."""

    def __init__(self, engine: Engine, limits: StreamLimits, *, is_open: bool) -> None:
        self._engine = engine
        self._limits = limits
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer until the client leaves, or the engine ends."""
        engine = self._engine
        observer = engine.observer
        feed = Feed(engine, None if self._is_open else tenant_of(scope))
        hello = feed.hello(engine.info.names[0], engine.config, observer.now_us())
        reply = Reply(scope, receive, send, dict)
        async with while_connected(receive), aclosing(followed(observer, feed)) as events:
            first = await anext(events)
            await reply(EventStream(hello + first, events, self._limits, _failure, scope[SCOPE_KEY]))


async def followed(observer: Observer, feed: Feed) -> AsyncGenerator[bytes]:
    """The feed's events, from a snapshot on. Raises as `Observer.viewer` and `Viewer.news`."""
    with observer.viewer() as viewer:
        while True:
            news, began_s = await viewer.news(), time.thread_time()
            told = feed.events(news)
            viewer.spend(time.thread_time() - began_s)
            if told:
                yield told
            await viewer.next_look()  # a list of records costs less than an event for each


def inspector_route(engine: Engine, limits: StreamLimits, *, is_open: bool) -> Route:
    """GET /v1/inspect/events."""
    return Route(PATH, InspectEvents(engine, limits, is_open=is_open), methods=["GET"])


def _failure(error: AserveError) -> bytes:
    return event(error_body(error))

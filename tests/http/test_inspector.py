"""The inspector's feed: what it tells to whom, that slow and departed readers cost nothing, and who is refused."""

import asyncio
import json
from types import SimpleNamespace

from aserve.engine import Engine
from aserve.http import AppOptions, Keyring, create_app
from aserve.http.inspector import PATH, Feed
from aserve.observe.observer import MAX_RECORDS, MAX_VIEWERS
from aserve.observe.records import NO_CHANGE, BlockChange, Card, Held, Move, Queue, Record, Run, Snapshot, Splice
from aserve.observe.viewer import News
from tests.engines import says, scripted_engine, scripted_loader
from tests.fakes import FakeScript, ScriptedRunner
from tests.http.conftest import client_of
from tests.http.peer import Peer, until

PROMPT = {"prompt": "a prompt of three blocks and more", "max_tokens": 4}
KEYS = "- {name: lab, key: of-lab}\n- {name: shop, key: of-shop}\n"


class Watcher(Peer):
    """A client of the feed."""

    def __init__(self, app, key=""):
        super().__init__(app, PATH, None)
        self._scope["method"] = "GET"
        self._incoming.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        if key:
            self._scope["headers"].append((b"authorization", f"Bearer {key}".encode()))

    @property
    def events(self):
        lines = self.text.split("\n\n")
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]

    def of_type(self, kind):
        return [event for event in self.events if event["type"] == kind]

    @property
    def records(self):
        return at_length([one for event in self.of_type("records") for one in event["records"]])

    def values(self, field):
        return [value for record in self.records for value in record.get(field, ())]

    @property
    def said(self):
        parts = []
        for record in self.records:
            parts += [text or "" for text in record.get("said", ())]
            parts += [text for _, text in record.get("texts", ())]
        return "".join(parts)

    async def see(self, condition):
        async with asyncio.timeout(20):
            while not condition(self):  # noqa: ASYNC110  it is sent ten times a second
                await asyncio.sleep(0.02)


def at_length(told):
    """Records, also those of runs, as docs/api.md says."""
    words = {}
    return [record for one in told for record in records_of(one, words)]


def records_of(run, words):
    words.update(run.get("words", ()))

    def spelled(said):
        return [words[one] if isinstance(one, int) else one for one in said]

    if "steps" not in run:
        said = spelled(run.get("said", ()))
        yield {name: value for name, value in run.items() if name != "words"} | ({"said": said} if said else {})
        return
    blocks = dict(run.get("blocks", ()))
    for place, (step, at_us, began_us, *phases) in enumerate(run["steps"]):
        work = {"step": step, "began_us": began_us, "phases": phases, "decodes": run["decodes"]}
        record = {"number": run["number"] + place, "at_us": at_us, "work": work, "said": spelled(run["said"][place])}
        yield record | ({"blocks": blocks[place]} if place in blocks else {})


def held_of(watcher):
    """What its events say of who holds which block."""

    def change(raw):
        tables = {name: tuple(Splice(*splice[:2], tuple(splice[2])) for splice in raw.get(name, ())) for name in TABLES}
        return BlockChange(**tables, **{name: tuple(raw.get(name, ())) for name in MARKS})

    held = Held(change(watcher.of_type("snapshot")[-1]["blocks"]))
    for record in watcher.records:
        held.apply(change(record.get("blocks", {})))
    return held


def changes_of(watcher, name):
    """Blocks that its events tell so, in their order."""
    return [block for record in watcher.records for block in record.get("blocks", {}).get(name, ())]


TABLES = ("tables", "host_tables")
MARKS = ("cached", "uncached", "kept", "dropped")


async def left(watcher, task):
    watcher.leave()
    await task


async def test_a_request_is_told_from_its_card_to_its_end(engine):
    app = create_app(engine)
    watcher = Watcher(app)
    task = watcher.start()
    await watcher.see(lambda w: w.of_type("snapshot"))
    async with client_of(app) as client:
        answer = await client.post("/v1/completions", json=PROMPT)
    await watcher.see(lambda w: w.values("moves"))
    hello, snapshot = watcher.events[:2]
    assert (hello["type"], hello["version"], hello["block_size"], hello["sees_all"]) == ("hello", 2, 8, True)
    assert (snapshot["type"], snapshot["cards"], snapshot["num_lost"]) == ("snapshot", [], 0)
    [card] = watcher.values("cards")
    assert (card["prompt"], card["num_prompt"], card["max_tokens"]) == (PROMPT["prompt"], 33, 4)
    assert watcher.said == answer.json()["choices"][0]["text"] == "Hell"
    works = [record["work"] for record in watcher.records if "work" in record]
    assert [work.get("pieces") for work in works] == [[[0, "prefill", 0, 33, 0, 0]], None, None, None]
    assert [work.get("decodes") for work in works] == [None, [0], [0], [0]]
    assert all(len(work["phases"]) == 6 and min(work["phases"]) >= 0 for work in works)
    assert watcher.values("moves") == [[0, "ended", "length"]]
    assert [number for number, *_ in watcher.values("admitted")] == [0]
    numbers = [record["number"] for record in watcher.records]
    assert numbers == list(range(snapshot["number"] + 1, snapshot["number"] + 1 + len(numbers)))
    held = held_of(watcher)
    assert not held.tables
    assert len(held.cached) == 4
    await left(watcher, task)


async def test_a_second_request_finds_the_first_ones_blocks(engine):
    app = create_app(engine)
    watcher = Watcher(app)
    task = watcher.start()
    await watcher.see(lambda w: w.of_type("snapshot"))
    async with client_of(app) as client:
        for _ in range(2):
            await client.post("/v1/completions", json=PROMPT)
    await watcher.see(lambda w: len(w.values("moves")) == 2)
    first, second = watcher.values("admitted")
    assert first == [0, 0, "none", []]
    assert second[:3] == [1, 32, "cache"]
    assert set(second[3]) <= held_of(watcher).cached
    await left(watcher, task)


async def test_who_comes_later_sees_what_is_there():
    runner = ScriptedRunner(model=FakeScript(says("Hello")))
    async with scripted_engine(runner=runner) as engine:
        app = create_app(engine)
        runner.hold()
        asked = Peer(app, "/v1/completions", PROMPT)
        asking = asked.start()
        await until(lambda: engine.statistics().num_running)
        watcher = Watcher(app)
        task = watcher.start()
        await watcher.see(lambda w: w.of_type("snapshot"))
        [snapshot] = watcher.of_type("snapshot")
        assert (snapshot["states"], snapshot["cards"][0]["prompt"]) == ([[0, "running"]], PROMPT["prompt"])
        assert len(held_of(watcher).tables[0]) == 5
        runner.let_land()
        await asking
        await watcher.see(lambda w: w.values("moves"))
        assert not held_of(watcher).tables
        await left(watcher, task)


async def test_of_beams_there_is_no_text(engine):
    """What is sampled for a beam is not its answer: the search chooses."""
    app = create_app(engine)
    watcher = Watcher(app)
    task = watcher.start()
    await watcher.see(lambda w: w.of_type("snapshot"))
    async with client_of(app) as client:
        beams = {"n": 2, "use_beam_search": True, "temperature": 0}
        await client.post("/v1/completions", json=PROMPT | beams)
    await watcher.see(lambda w: len(w.values("moves")) == 2)
    assert watcher.said == ""
    assert {text for record in watcher.records for text in record.get("said", ())} == {None}
    await left(watcher, task)


async def test_a_character_of_several_tokens_is_told_when_it_is_whole():
    async with scripted_engine(says("aé€b")) as engine:
        app = create_app(engine)
        watcher = Watcher(app)
        task = watcher.start()
        await watcher.see(lambda w: w.of_type("snapshot"))
        async with client_of(app) as client:
            await client.post("/v1/completions", json=PROMPT | {"max_tokens": 20})
        await watcher.see(lambda w: w.values("moves"))
        assert watcher.said.startswith("aé€b")
        assert "\ufffd" not in watcher.said
        await left(watcher, task)


async def test_of_other_tenants_is_told_how_many_and_which_blocks(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    engine = Engine(scripted_loader(says("Secret")))
    app = create_app(engine, keyring=Keyring(path=path, tenants=engine.tenants))
    async with engine:
        watchers = {key: Watcher(app, key) for key in ("of-lab", "of-shop")}
        tasks = {key: watcher.start() for key, watcher in watchers.items()}
        for watcher in watchers.values():
            await watcher.see(lambda w: w.of_type("snapshot"))
        async with client_of(app) as client:
            await client.post("/v1/completions", json=PROMPT, headers={"Authorization": "Bearer of-lab"})
        for key, watcher in watchers.items():
            assert not watcher.of_type("hello")[0]["sees_all"]
            if key == "of-lab":
                await watcher.see(lambda w: w.values("moves"))
                [card] = watcher.values("cards")
                assert (card["num_prompt"], card["tenant"], card["prompt"]) == (33, "lab", PROMPT["prompt"])
                assert watcher.said == "Secr"
                assert not changes_of(watcher, "held")
            else:
                await watcher.see(lambda w: changes_of(w, "released"))
                works = [record["work"] for record in watcher.records if "work" in record]
                assert [work.get("pieces") for work in works] == [[[-1, "prefill", 0, 33, 0, 0]], None, None, None]
                assert [work.get("decodes") for work in works] == [None, [-1], [-1], [-1]]
                assert sorted(changes_of(watcher, "held")) == sorted(changes_of(watcher, "released"))
                assert len(changes_of(watcher, "held")) == 5
                counts = [record["others"] for record in watcher.records if "others" in record]
                assert counts[-1] == {"running": 0, "waiting": 0, "swapped": 0}
                assert {"running": 1, "waiting": 0, "swapped": 0} in counts
                for name in ("cards", "admitted", "moves", "texts"):
                    assert watcher.values(name) == []
                assert watcher.said == ""
                for secret in ("lab", "three blocks", "Secr"):
                    assert secret not in watcher.text
            await left(watcher, tasks[key])


async def test_it_asks_for_a_key_where_others_do_and_goes_with_the_pages(engine):
    for options in (AppOptions(), AppOptions(ui=False)):
        async with client_of(create_app(engine, api_keys=["key"], options=options)) as client:
            assert (await client.get(PATH)).status_code == 401
    async with client_of(create_app(engine, options=AppOptions(ui=False))) as client:
        assert (await client.get(PATH)).status_code == 404
        assert PATH not in (await client.get("/openapi.json")).json()["paths"]


async def test_there_are_no_more_viewers_than_may_be(engine):
    app = create_app(engine)
    watchers = [Watcher(app) for _ in range(MAX_VIEWERS)]
    tasks = [watcher.start() for watcher in watchers]
    for watcher in watchers:
        await watcher.see(lambda w: w.of_type("snapshot"))
    async with client_of(app) as client:
        refused = await client.get(PATH)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert "retry-after" in refused.headers
        await left(watchers[0], tasks[0])
        another = Watcher(app)
        task = another.start()
        await another.see(lambda w: w.of_type("snapshot"))
        await left(another, task)
    for watcher, task in zip(watchers[1:], tasks[1:], strict=True):
        await left(watcher, task)
    assert not engine.observer.is_watched


async def test_a_head_of_the_feed_ends_and_is_no_viewer(engine):
    """Catches a connection that waits for ever for a body that must not come, and holds a viewer's place."""
    async with client_of(create_app(engine)) as client:
        for _ in range(MAX_VIEWERS + 1):
            head = await client.head(PATH)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-type"].startswith("text/event-stream")
    assert not engine.observer.is_watched


async def test_a_reader_who_stalls_loses_records_and_holds_nobody_up(engine):
    app = create_app(engine)
    watcher = Watcher(app)
    task = watcher.start()
    await watcher.see(lambda w: w.of_type("snapshot"))
    watcher.stop_reading()
    async with client_of(app) as client:
        for _ in range(30):
            long = await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 100, "ignore_eos": True})
            assert long.status_code == 200
    [viewer] = engine.observer._viewers
    assert len(viewer._records) <= MAX_RECORDS
    watcher.read_on()
    await watcher.see(lambda w: len(w.of_type("snapshot")) == 2)
    assert watcher.of_type("snapshot")[-1]["num_lost"] > MAX_RECORDS
    await left(watcher, task)


async def test_the_end_of_the_engine_is_told():
    async with scripted_engine() as engine:
        app = create_app(engine)
        watcher = Watcher(app)
        task = watcher.start()
        await watcher.see(lambda w: w.of_type("snapshot"))
    await task
    last = watcher.text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"


class Texts:
    """Tokens 0 to 7 are letters, 8 and 9 the halves of an é, 10 is a special one: no text."""

    token_bytes = (*(bytes([97 + number]) for number in range(8)), b"\xc3", b"\xa9", b"<end>")
    text_bytes = (*token_bytes[:10], b"")
    token_texts = (*"abcdefgh", None, None, "")


STEPS = tuple((7 + place, 100 + place, 90 + place, 1, 2, 3, 4, 5, 6) for place in range(3))


def feed_of_two(tenant=None):
    """Of a client that was told of two sequences that run."""
    feed = Feed(SimpleNamespace(texts=SimpleNamespace(tokenizer=Texts)), tenant)
    cards = tuple(Card(seq, seq, 0, 1, 9, 0, True, f"id{seq}", "lab", None, ()) for seq in (1, 2))
    feed.events(News(0, Snapshot(1, 1, cards, ((1, "running"), (2, "running")), Queue(), NO_CHANGE), ()))
    return feed


def fed(decoded, *, tenant=None):
    """The records that a client is sent of a run with these tokens, and how many events' records they were in short."""
    blocks = BlockChange(tables=(Splice(1, 2, (5,)),), cached=(4,))
    feed = feed_of_two(tenant)
    run = Run(2, (1, 2), STEPS[: len(decoded)], decoded, ((1, blocks),))
    told = json.loads(feed.events(News(0, None, (run,))).removeprefix(b"data: "))["records"]
    in_full = json.loads(feed_of_two(tenant).events(News(0, None, tuple(run.records()))).removeprefix(b"data: "))[
        "records"
    ]
    return at_length(told), at_length(in_full), len(told)


def test_a_run_says_what_its_records_say():
    told, in_full, num_told = fed(((0, 1), (2, 3), (4, 5)))
    assert told == in_full
    assert ([record["said"] for record in told], num_told) == ([["a", "b"], ["c", "d"], ["e", "f"]], 1)


def test_a_word_is_told_once():
    feed, runs = feed_of_two(), [Run(2, (1, 2), STEPS[:1], ((0, 1),)), Run(3, (1, 2), STEPS[:1], ((1, 2),))]
    first, second = (json.loads(feed.events(News(0, None, (run,))).removeprefix(b"data: "))["records"] for run in runs)
    assert [first[0]["words"], second[0]["words"]] == [[[0, "a"], [1, "b"]], [[2, "c"]]]
    assert [record["said"] for record in at_length(first + second)] == [["a", "b"], ["b", "c"]]


def test_what_was_sampled_behind_an_end_is_not_said():
    """A step may be under way when the one before it turns out to have ended an answer."""
    feed = feed_of_two()
    ended = Record(2, 50, moves=(Move(1, "ended", "stop"),))
    run = Run(3, (1, 2), STEPS[:1], ((0, 1),))
    told = json.loads(feed.events(News(0, None, (ended, run))).removeprefix(b"data: "))["records"]
    assert [record.get("said") for record in at_length(told)] == [None, [None, "b"]]
    assert told[1]["words"] == [[1, "b"]]


def test_characters_of_several_tokens_are_told_when_they_are_whole():
    told, in_full, num_told = fed(((0, 8), (1, 9), (2, 3)))
    assert told == in_full
    assert ([record["said"] for record in told], num_told) == ([["a", ""], ["b", "é"], ["c", "d"]], 1)


def test_what_follows_half_a_character_is_told_with_what_stands_for_it():
    told, _, _ = fed(((0, 8), (1, 2), (3, 4)))
    assert [record["said"] for record in told] == [["a", ""], ["b", "\ufffdc"], ["d", "e"]]


def test_a_special_token_is_no_text_behind_half_a_character_either():
    told, in_full, _ = fed(((0, 8), (10, 10), (1, 9)))
    assert told == in_full
    assert [record["said"] for record in told] == [["a", ""], ["", ""], ["b", "é"]]


def test_others_tokens_are_told_at_length():
    told, _, num_told = fed(((0, 1), (2, 3)), tenant="shop")
    assert [record["said"] for record in told] == [[None, None]] * 2
    assert (told[0]["work"]["decodes"], num_told) == ([-1, -1], 2)

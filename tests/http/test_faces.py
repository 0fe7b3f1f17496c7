"""The law of every face: a stream comes to the whole answer, and whoever leaves it leaves nothing behind.

Answers are thoughts, calls, texts and what looks like them, cut by stop strings and by their length. That a parser's
events do not hang on how text is cut is the parsers' own law (tests/text/formats/test_law.py).
"""

import asyncio
import json
from itertools import cycle, product
from random import Random

import pytest

from aserve.http import create_app
from tests.engines import says
from tests.fakes import FakeScripts, ScriptedRunner
from tests.http.conftest import client_of
from tests.http.faces import FACES, MESSAGES, Asked, Face
from tests.http.peer import Peer
from tests.http.test_tools import CALL, THOUGHT, speaking

TEXTS = (
    "Hello, wörld! \N{FOX FACE} STOP and more",
    f"{THOUGHT}Let me see.\n{CALL}\n{CALL}",
    f"{THOUGHT}STOP{CALL}",
    "<think>\nWell STOP\n</think>\n\nSo it is. <tool_call>none</tool_call> STO",
    CALL[:-20],
    "<think>never ended <tool_ca",
    '<tool_call>{"name": "now", "arguments": {"STOP": "\\u00e9\\n"}}</tool_call>\n\nDone.',
    "",
)
FORMATS = ({}, {"call_format": None, "thought_format": None})
"""Of a model whose answers are parsed, and of one whose text goes to the wire as it is."""
NUM_TRIED = 32
"""Combinations of what a face can be asked for that are tried every time; the thorough run tries the others."""
TRIED = pytest.mark.parametrize(
    "part", [slice(NUM_TRIED), pytest.param(slice(NUM_TRIED, None), marks=pytest.mark.thorough)], ids=["some", "others"]
)
EVERY_FACE = pytest.mark.parametrize("face", FACES, ids=[face.name for face in FACES])
CUT = f"{THOUGHT}So it is. {CALL}\n".encode()
"""It ends by its length alone."""
MANY = f"{THOUGHT}Let me see. {CALL} STOP {CALL}"


def asking(face: Face) -> list[Asked]:
    """Every combination of what a face can be asked for, in an order of chance that is always the same."""
    nums = (1, 3) if face.has_choices else (1,)
    flags = [(False, True)] * 3
    asked = [Asked(*each) for each in product((2000, 17, 1), range(len(TEXTS)), nums, (None, "STOP"), *flags)]
    Random(face.name).shuffle(asked)
    return asked


def saying(*texts: str) -> ScriptedRunner:
    """Says the text that a request's seed tells, counted round them."""
    return ScriptedRunner(model=FakeScripts([says(text) for text in texts]))


async def both(client, face: Face, asked: Asked):
    """The whole answer, and the stream's text, of prompts that share no cache."""
    texts = []
    for salt, body in (("a", face.body(asked)), ("b", face.stream_body(asked))):
        salted = body if face is MESSAGES else {**body, "cache_salt": f"{salt}{id(asked)}"}
        response = await client.post(face.url, json=salted)
        assert response.status_code == 200, response.text
        texts.append(response.text)
    return face.whole(json.loads(texts[0])), texts[1]


@pytest.mark.parametrize("formats", FORMATS, ids=["parsed", "plain"])
@TRIED
@EVERY_FACE
async def test_a_stream_comes_to_the_whole_answer(face, part, formats):
    """Catches what a stream leaves out, tells twice, in another order, or counts otherwise."""
    asked = asking(face)[part]
    has_seeds = face is not MESSAGES
    for number in (0,) if has_seeds else range(len(TEXTS)):
        runner = saying(*(TEXTS if has_seeds else TEXTS[number : number + 1]))
        async with speaking("", runner=runner, **formats) as engine, client_of(create_app(engine)) as client:
            for each in asked:
                if has_seeds or each.seed == number:
                    whole, stream = await both(client, face, each)
                    assert face.streamed(stream) == whole, each
            assert held(engine) == (0, 0, 0)


@EVERY_FACE
async def test_the_law_sees_a_stream_that_loses_a_piece(face):
    """The check itself."""
    async with speaking("", runner=saying(TEXTS[1])) as engine, client_of(create_app(engine)) as client:
        whole, stream = await both(client, face, Asked(has_tools=True))
    assert face.streamed(stream) == whole
    pieces = stream.split("\n\n")
    del pieces[len(pieces) // 2]
    with pytest.raises((AssertionError, LookupError)):
        assert face.streamed("\n\n".join(pieces)) == whole


@EVERY_FACE
async def test_wherever_a_stream_is_cut_its_blocks_are_free_within_two_steps(face):
    """Catches blocks, rows or tasks that outlive their reader, at whatever event he leaves."""
    runner = ScriptedRunner(model=FakeScripts([CUT]))
    async with speaking("", runner=runner) as engine:
        app, before = create_app(engine), asyncio.all_tasks()
        body = face.stream_body(Asked(max_tokens=len(CUT), has_tools=True))
        whole = Peer(app, face.url, body)
        await whole.start()
        assert face.end in whole.text
        assert len(whole.sent) > 40
        for num_messages in range(len(whole.sent)):
            peer = Peer(app, face.url, body)
            task = peer.start()
            await peer.receive_messages(num_messages)
            runner.hold()  # a step takes longer than a loop's turn
            peer.leave()
            num_plans = len(runner.plans)
            await task
            assert held(engine) == (0, 0, 0), num_messages
            assert len(runner.plans) - num_plans <= 2, num_messages
            runner.let_land()
        assert asyncio.all_tasks() <= before


async def test_sixty_four_clients_some_of_whom_leave_at_random_moments():
    """Catches an answer that another's departure shortens, spoils or ends, on any face, and whatever stays behind."""
    chance = Random(64)
    async with speaking("", runner=saying(MANY), max_num_seqs=12) as engine:
        app, before = create_app(engine), asyncio.all_tasks()
        asked = [Asked(n=chance.choice((1, 2)), stop=chance.choice((None, "STOP")), has_tools=True) for _ in range(64)]
        clients = list(zip(cycle(FACES), asked, strict=False))
        peers = [Peer(app, face.url, face.stream_body(each)) for face, each in clients]
        turns = {number: chance.randrange(200) for number in chance.sample(range(64), 40)}

        async def live(number):
            task = peers[number].start()
            if number in turns:
                for _ in range(turns[number]):
                    await asyncio.sleep(0)
                peers[number].leave()
            await task

        await asyncio.gather(*map(live, range(64)))
        assert held(engine) == (0, 0, 0)
        assert asyncio.all_tasks() <= before
        stayed = [number for number in range(64) if number not in turns]
        num_cut = sum(bool(peers[n].sent) and clients[n][0].end not in peers[n].text for n in turns)
        assert num_cut >= 8, "some leave before they are served, or after"
        async with client_of(app) as client:
            for number in stayed:
                face, each = clients[number]
                whole = face.whole((await client.post(face.url, json=face.body(each))).json())
                assert without_cached(face.streamed(peers[number].text)) == without_cached(whole)


def held(engine):
    statistics = engine.statistics()
    return statistics.num_used_blocks, statistics.num_running, statistics.num_waiting


def without_cached(said):
    """What was cached of a prompt hangs on who came before."""
    for usage in (said["usage"], *(choice.get("usage", {}) for choice in said["choices"])):
        usage.pop("prompt_tokens_details", None)
        usage.pop("input_tokens_details", None)
    return said

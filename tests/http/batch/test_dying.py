"""Lines at which the process dies: whose fault it was is found out, and then the line is not run any more."""

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from itertools import chain

from aserve.http import AppOptions, create_app
from aserve.stores.batches import SCHEMA, SCHEMA_VERSION, BatchStore, StoredBatch, Suspect
from tests.engines import scripted_engine
from tests.http.batch.dying import BATCHES
from tests.stores.killing import ROOT

MAX_STARTS = 6


def said(path):
    command = [sys.executable, "-m", "tests.http.batch.dying", str(path)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    return done.returncode, done.stdout.splitlines()


def test_a_line_of_which_the_process_dies_is_given_up_and_no_other(tmp_path):
    """Caught: a process that died of the same line at each of its starts, for ever."""
    path, starts = tmp_path / "a.db", []
    while not starts or (starts[-1][0] and len(starts) < MAX_STARTS):
        starts.append(said(path))
    assert [code for code, _ in starts] == [-9, -9, -9, 0], "twice among others, once alone"
    *_, (_, third), (_, last) = starts
    assert third[-1] == "run poison"
    assert "run poison" not in last
    told = [line.split(" ", 2) for line in last if not line.startswith("run ")]
    assert {status for _, status, _ in told} == {"completed"}
    answered = {json.loads(text)["custom_id"] for field, _, text in told if field == "output_file_id"}
    [given_up] = [json.loads(text) for field, _, text in told if field == "error_file_id"]
    assert answered == {*chain(*BATCHES)} - {"poison"}
    assert (given_up["custom_id"], given_up["error"]["code"]) == ("poison", "line_ends_process")
    assert "died 3 times while this line was being run" in given_up["error"]["message"]


async def test_lines_of_a_process_that_ended_as_it_should_are_not_suspected(tmp_path):
    """Catches a batch that is run a line at a time after some restarts of its server."""
    options = AppOptions(batch_store=str(tmp_path / "a.db"))
    state = {"id": "b", "status": "in_progress", "input_file_id": "f", "endpoint": "/v1/completions"}
    for _ in range(3):
        async with scripted_engine() as engine:
            batches = create_app(engine, options=options).state.batches
            batches._start = lambda _batch: None
            await batches.store.put_batch(StoredBatch("b", "", 1, state))
            await batches.resume()
            assert await batches.store.suspects("b") == []
            batches.close()


async def test_who_is_suspected(tmp_path):
    """Catches suspicion of lines that could not be running, and of others where one was run alone."""
    path = str(tmp_path / "a.db")
    states = []
    for _ in range(4):
        store = BatchStore(path)
        num_lines = await store.begin_running(2)
        if num_lines:
            await store.suspect("b", num_lines)
        states.append(await store.suspects("b"))
        await store.add_result("b", 0, b"{}", is_error=False)
        if len(states) == 3:
            await store.run_alone("b", 2)
        store.close(has_died=True)
    two = [Suspect(1, 2, False), Suspect(2, 2, False)]
    assert states == [[], [Suspect(1, 1, False), Suspect(2, 1, False)], two, [two[0], Suspect(2, 2, True)]]


async def test_a_file_of_an_earlier_version_is_opened(tmp_path):
    path = str(tmp_path / "a.db")
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(f"{SCHEMA}; PRAGMA user_version={SCHEMA_VERSION}")
    with closing(BatchStore(path)) as store:
        assert await store.begin_running(2) == 0
        assert await store.suspects("b") == []

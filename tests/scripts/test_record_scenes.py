"""The tour's scenes: those that are shipped are whole and small, and can be recorded again."""

import json

import pytest
import record_scenes

from aserve.http.inspector import VERSION
from aserve.observe.records import BlockChange, Held, Splice

MAX_BYTES = 40_000
TABLES, MARKS = ("tables", "host_tables"), ("cached", "uncached", "kept", "dropped")


def change(raw):
    tables = {
        name: tuple(Splice(seq, kept, tuple(blocks)) for seq, kept, blocks in raw.get(name, ())) for name in TABLES
    }
    return BlockChange(**tables, **{name: tuple(raw.get(name, ())) for name in MARKS})


def check(scene, raw):
    """A recording has the captions of its scene, at records that it has, and ends with nothing held."""
    assert (raw["type"], raw["version"], raw["title"]) == ("recording", VERSION, scene.title)
    [records] = raw["chunks"]
    assert [record["number"] for record in records] == list(range(1, len(records) + 1))
    assert [caption["words"] for caption in raw["captions"]] == [words for _, words in scene.captions]
    numbers = [caption["number"] for caption in raw["captions"]]
    assert numbers == sorted(set(numbers))
    for number, (condition, words) in zip(numbers, scene.captions, strict=True):
        assert condition(records[number - 1]), words
    held = Held(change(raw["snapshot"]["blocks"]))
    for record in records:
        held.apply(change(record.get("blocks", {})))
    assert (held.tables, held.host_tables) == ({}, {})
    assert max(map(int, held.cached), default=0) < raw["hello"]["num_blocks"]


@pytest.mark.parametrize("scene", record_scenes.SCENES, ids=lambda scene: scene.name)
def test_what_is_shipped_is_as_the_captions_say(scene):
    check(scene, json.loads((record_scenes.FOLDER / scene.name).read_text()))


def test_the_page_is_told_of_all_scenes_and_they_are_small():
    index = json.loads((record_scenes.FOLDER / "index.json").read_text())
    assert index == [scene.name for scene in record_scenes.SCENES]
    assert sum(path.stat().st_size for path in record_scenes.FOLDER.glob("*.json")) <= MAX_BYTES


@pytest.mark.slow
@pytest.mark.torch
async def test_a_scene_can_be_recorded():
    for scene in record_scenes.SCENES[3:5]:
        check(scene, json.loads(await record_scenes.record(scene)))


def test_a_caption_of_what_is_not_there_is_refused():
    scene = record_scenes.SCENES[0]
    with pytest.raises(LookupError, match="nothing is as it is told"):
        record_scenes.captioned(scene, [{"number": 1, "at_us": 0}])

"""Every call between floors has a fault point, or a reason why it has none."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults.points import Point
from tests.faults.rooms import ALL_POINTS
from tests.faults.seams import Seam, room_of, seams
from tests.faults.world import World

pytestmark = pytest.mark.torch

NO_POINT: Mapping[str, Sequence[str]] = {
    "made when the engine is entered, left or drained, or when an operator asks: no request is being worked on": (
        "aserve.adapters Adapters.__init__",
        "aserve.adapters Adapters.close",
        "aserve.adapters Adapters.names",
        "aserve.engine Engine.__aenter__",
        "aserve.engine Engine.aclose",
        "aserve.engine Engine.drain",
        "aserve.engine Engine.is_cached",
        "aserve.engine Engine.reset_prefix_cache",
        "aserve.engine Engine.statistics",
        "aserve.engine_loop EngineLoop.__init__",
        "aserve.engine_parts load_in_thread",
        "aserve.http.tasks task_group",
        "aserve.kv_cache.paged_cache PagedCache.__init__",
        "aserve.kv_cache.paged_cache PagedCache.is_cached",
        "aserve.kv_cache.paged_cache PagedCache.reset",
        "aserve.kv_cache.paged_cache PagedCache.statistics",
        "aserve.metrics.engine_metrics EngineMetrics.__init__",
        "aserve.models.lora LoraLayers.blank",
        "aserve.observe.observer Observer.__init__",
        "aserve.observe.observer Observer.close",
        "aserve.preparation Preparer.__init__",
        "aserve.routing.ledger Ledger.__init__",
        "aserve.routing.ledger Ledger.digest",
        "aserve.scheduler.scheduler Scheduler.__init__",
        "aserve.scheduler.scheduler Scheduler.reset_prefix_cache",
        "aserve.stores.batches BatchStore.__init__",
        "aserve.stores.batches BatchStore.close",
        "aserve.stores.responses MemoryStore.__init__",
        "aserve.stepping Stepper.__init__",
        "aserve.structures Structures.__init__",
        "aserve.tenants Tenants.__init__",
        "aserve.tenants Tenants.declare",
        "aserve.tenants Tenants.usages",
        "aserve.text.tokenizer Tokenizer.info",
        "aserve.workers Workers.__init__",
        "aserve.workers Workers.close",
    ),
    "looks at arguments alone, before anything is begun": (
        "aserve.intake branches_of",
        "aserve.intake known_id",
    ),
    "called by a process that goes on with what a killed one has left: tests/http/batch/test_dying.py": (
        "aserve.stores.batches BatchStore.acquit",
        "aserve.stores.batches BatchStore.begin_running",
        "aserve.stores.batches BatchStore.run_alone",
        "aserve.stores.batches BatchStore.suspect",
    ),
    "an edge itself, or what is called because of another fault": (
        "aserve.edges aside",
        "aserve.edges heard",
        "aserve.edges is_fault",
        "aserve.engine_loop EngineLoop.end",
        "aserve.http.errors error_body",
        "aserve.kv_cache.paged_cache PagedCache.quarantine",
        "aserve.kv_cache.paged_cache PagedCache.restart",
        "aserve.mailbox Mailbox.fail",
        "aserve.scheduler.scheduler Scheduler.expel",
        "aserve.scheduler.scheduler Scheduler.restart",
        "aserve.stepping Stepper.may_tear",
    ),
    "the loop itself, which ends the engine where it raises; all that it calls has points": (
        "aserve.engine_loop EngineLoop.run",
        "aserve.engine_loop EngineLoop.watch",
        "aserve.stepping Stepper.run_until_idle",
    ),
    "what tests call, to look for what does not hold": (
        "aserve.kv_cache.checks check_hashes",
        "aserve.kv_cache.paged_cache PagedCache.check",
        "aserve.kv_cache.paged_cache PagedCache.check_visible",
    ),
    "a name that is another's: no such call is made": (
        "aserve.adapters Adapters._load",
        "aserve.answers Answers.explanation",
        "aserve.answers Answers.open",
        "aserve.engine Engine.__init__",
        "aserve.engine Engine._running",
        "aserve.engine Engine.abort",
        "aserve.scheduler.sequence Sequence.__init__",
        "aserve.stores.responses MemoryStore.get",
    ),
    "part of a Scheduler's own calls (add, fork, cancel, commit), which have points, in the class that records": (
        "aserve.scheduler.scheduler Scheduler._add",
        "aserve.scheduler.scheduler Scheduler._end",
    ),
    "part of a feed's own calls (feed made, feed events), which have points, where keys are asked for": (
        "aserve.observe.others TenantView.__init__",
        "aserve.observe.others TenantView.record",
        "aserve.observe.others TenantView.snapshot",
    ),
    "a constructor that keeps its arguments, made where texts are worked on, which has points": (
        "aserve.http.direct DirectLine.__init__",
        "aserve.texts Texts.__init__",
    ),
    "beside a request, where a router is in front: tests/http/test_replica.py lets each of them raise": (
        "aserve.kv_cache.hashing prompt_hashes",
        "aserve.routing.keys has_one_prompt",
        "aserve.routing.keys keys_of",
        "aserve.routing.ledger Ledger.awaits",
        "aserve.routing.ledger Ledger.came",
        "aserve.routing.ledger Ledger.ended",
        "aserve.routing.ledger hashes_of",
    ),
    "for requests with an Idempotency-Key alone, whose own tests have them raise (tests/http/test_idempotency.py)": (
        "aserve.stores.idempotency IdempotencyStore.__init__",
        "aserve.stores.idempotency IdempotencyStore.begin",
        "aserve.stores.idempotency IdempotencyStore.find",
        "aserve.stores.idempotency IdempotencyStore.settle",
        "aserve.stores.idempotency KeptAnswer.add",
        "aserve.stores.idempotency KeptAnswer.begin",
        "aserve.stores.idempotency KeptAnswer.end",
        "aserve.stores.idempotency KeptAnswer.pieces",
    ),
    "within a forward pass, whose edge is the runner's (model forward), or while a model is loaded": (
        "aserve.kernels",
        "aserve.models.encoder Encoder.of_tokens",
    ),
}
"""Seams without a point, and why: "module name", or a module with all that is in it."""


def covered() -> set[Seam]:
    """What the sweep's points put a trap at, by where it is defined, and by where it is called."""
    worlds: dict[type[World], World] = {}
    return {seam for point in ALL_POINTS for seam in _of(point, worlds)}


def _of(point: Point, worlds: dict[type[World], World]) -> set[Seam]:
    world = worlds.setdefault(point.world, point.world())
    found = set()
    for owner, attribute in point.seams(world):
        call: Any = inspect.unwrap(getattr(owner, attribute))
        found.add((getattr(call, "__module__", ""), getattr(call, "__qualname__", "")))
        if isinstance(owner, type):
            found.add((owner.__module__, f"{owner.__qualname__}.{attribute}"))
    return found


def is_excused(seam: Seam) -> bool:
    """Whether there is a reason that it has no point."""
    return " ".join(seam) in EXCUSED or any(seam[0].startswith(excuse + ".") for excuse in EXCUSED)


EXCUSED = {excuse for excuses in NO_POINT.values() for excuse in excuses}


async def test_every_call_between_floors_has_a_point():
    """Catches a room that comes without fault points."""
    missing = {" ".join(seam): callers for seam, callers in UNCOVERED.items() if not is_excused(seam)}
    assert not missing, "add a Point (tests/faults/rooms.py), or a reason to NO_POINT"


async def test_no_excuse_is_stale():
    """Catches a seam that is gone, or has a point after all, and still has an excuse."""
    names = {" ".join(seam) for seam in UNCOVERED}
    stale = {e for e in EXCUSED if e not in names and not any(m.startswith(e + ".") for m, _ in UNCOVERED)}
    assert not stale


UNCOVERED: dict[Seam, set[str]] = {}
"""Seams without a point, and who calls them."""


@pytest.fixture(autouse=True, scope="module")
def _uncovered():
    points = covered()
    UNCOVERED.update({seam: callers for seam, callers in seams().items() if seam not in points})


def test_a_new_seam_is_found(tmp_path: Path):
    """Catches a search that sees no calls."""
    package = tmp_path / "aserve"
    for room in ("http", "scheduler", "core"):
        (package / room).mkdir(parents=True)
    (package / "core" / "rules.py").write_text("def check(): ...\n")
    (package / "scheduler" / "new_room.py").write_text(
        "class Room:\n"
        "    def __init__(self): ...\n"
        "    def enter(self): ...\n"
        "    def leave(self): ...\n"
        "class Size(Struct):\n"
        "    def enter(self): ...\n"
        "def open_all(): ...\n"
    )
    (package / "http" / "caller.py").write_text(
        "from aserve.core.rules import check\n"
        "from aserve.scheduler.new_room import Room, Size, open_all\n"
        "def call(room: Room, size: Size):\n"
        "    check()\n"
        "    room.enter()\n"
        "    open_all()\n"
    )
    (package / "scheduler" / "neighbour.py").write_text(
        "from aserve.scheduler.new_room import Room\ndef call():\n    Room().leave()\n"
    )
    module = "aserve.scheduler.new_room"
    assert seams(package) == {
        (module, "Room.enter"): {"aserve.http.caller"},
        (module, "open_all"): {"aserve.http.caller"},
    }
    assert room_of(module) == "scheduler"

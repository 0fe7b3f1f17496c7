"""The soak's server: the demonstration model with adapters, drafts and faults, which tells what it holds.

Two kinds of faults are planted. A passing one is a launch that raises once: the next launch never does, so that nobody
may end by it, who runs alone least of all. A poisoned request makes every launch raise that computes it from a position
on: it has to end with an error, and nobody else. Poison is known by the request's seed.

    seed POISON + 0    the launch of its prompt raises, and every other one
    seed POISON + 40   those that come to position 40
"""

import asyncio
import ctypes
import dataclasses
import json
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

SAMPLE_S: Final = 5.0
POISON: Final = 7_100_000
POISON_POSITIONS: Final = range(1000)
ADAPTERS: Final = ("first", "second", "third")
"""One more than there is room for, so that they are evicted and read again."""
NUM_LOADED: Final = 2


class FaultyRunner:
    """A `Runner` of which one launch in `fault_every` raises, and those of poisoned requests. Chance is seeded."""

    def __init__(self, runner: Any, fault_every: int) -> None:
        self._runner = runner
        self._fault_every = fault_every
        self._chance = random.Random(0)
        self._has_just_raised = False
        self._poisoned: dict[int, tuple[int, int]] = {}
        """By row: the sequence, and the position from which on it is poison."""
        self.recover = runner.recover
        self.close = runner.close
        self.num_passing = 0
        self.num_poisoned = 0

    def launch(self, plan: Any) -> Any:
        """The runner's, or a fault."""
        for init in plan.inits:
            position = int(init.sampling.columns.seed) - POISON
            self._poisoned.pop(init.row, None)
            if position in POISON_POSITIONS:
                self._poisoned[init.row] = init.seq_id, position
        if any(self._is_poison(piece) for piece in plan.slices):
            self.num_poisoned += 1
            raise RuntimeError("a poisoned request")
        self._has_just_raised = not self._has_just_raised and self._chance.randrange(self._fault_every) == 0
        if self._has_just_raised:
            self.num_passing += 1
            raise RuntimeError("a passing fault")
        return self._runner.launch(plan)

    def _is_poison(self, piece: Any) -> bool:
        seq_id, position = self._poisoned.get(piece.row, (None, 0))
        return bool(piece.seq_id == seq_id and piece.start + piece.num_tokens > position)


def serve(fault_every: int, folder: Path) -> int:
    """Serve on a free port, telling on standard output where, and then what is held. folder: of keys and adapters."""
    from load.adapters import write_adapter

    from aserve.build import loader, make_options
    from aserve.cli.commands import bound_product_caches, end_loading
    from aserve.engine import Engine, EngineParts, Progress
    from aserve.http import Keyring, create_app
    from aserve.model_folder import DEMO_FOLDER
    from aserve.server import Server, ServerConfig
    from aserve.server.lifecycle import run_until_signal

    bound_product_caches(os.environ)
    for number, name in enumerate(ADAPTERS):
        write_adapter(folder / name, str(DEMO_FOLDER), 4, number)
    runners: list[FaultyRunner] = []
    options = make_options(
        model="demo",
        max_num_seqs=8,
        enable_lora=True,
        lora_modules={name: str(folder / name) for name in ADAPTERS},
        max_loras=NUM_LOADED,
        max_cpu_loras=NUM_LOADED,
        speculative_config={"method": "ngram"},
    )
    load = loader(options)

    def load_faulty(report: Callable[[Progress], None]) -> EngineParts:
        parts = load(report)
        runners.append(FaultyRunner(parts.runner, fault_every))
        return dataclasses.replace(parts, runner=runners[0])

    engine = Engine(load_faulty)

    async def tell() -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            print(json.dumps(held(engine, runners[0])), flush=True)

    async def main() -> int:
        telling: list[asyncio.Task[None]] = []

        def ready(url: str) -> None:
            end_loading()
            print(url, flush=True)
            telling.append(asyncio.create_task(tell()))

        keyring = Keyring(path=str(folder / "keys.yaml"), tenants=engine.tenants)
        app = create_app(engine, keyring=keyring)
        server = Server(engine, app, ServerConfig(port=0), on_ready=ready, on_hangup=keyring.reload)
        code = await run_until_signal(server)
        for task in telling:
            task.cancel()
        return code

    return asyncio.run(main())


class MallInfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def heap_kib() -> int:
    """What malloc has handed out. Needs glibc 2.33."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallInfo
    return int(mallinfo2().uordblks) // 1024


def held(engine: Any, runner: FaultyRunner) -> dict[str, Any]:
    """What the server's process holds at this moment, and what it has counted. errors: requests ended by one."""
    counts = engine.statistics()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    labels = {"model_name": engine.info.names[0], "finished_reason": "error"}
    return {
        "at_s": time.monotonic(),
        "resident_kib": int(status["VmRSS"].split()[0]),
        "heap_kib": heap_kib(),
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "used_blocks": counts.num_used_blocks,
        "running": counts.num_running,
        "waiting": counts.num_waiting,
        "passing_faults": runner.num_passing,
        "poisoned_launches": runner.num_poisoned,
        "errors": int(engine.registry.get_sample_value("aserve_request_success_total", labels) or 0),
        "accepted_drafts": sum(counts.num_accepted_by_position),
        "preemptions": counts.num_preemptions,
    }

"""SimulatedReplica: a queue, a speed, and a prefix cache of a bounded number of blocks.

    arrives --> waits, first come first served --> its blocks are found or taken --> prefill --> first token --> decodes

One prompt is computed at a time, at `prefill_tokens_per_s` shared with those that decode; any number decode at once,
each at the same pace. A request holds the blocks of its prompt and its answer until it ends; those of prompts stay in
the cache until others need the room, the least recently used first and a prompt's last before its first. What is
computed can be found once it is all computed.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import cast

from aserve.core.ids import BlockHash
from aserve.routing.ledger import Ledger
from aserve.routing.report import ReplicaReport

from .arrivals import BLOCK_TOKENS, BYTES_PER_TOKEN, Arrival


@dataclass(frozen=True, slots=True)
class Service:
    """What a replica can do. decode_s: between two tokens of an answer. decode_share: of its speed that each costs."""

    prefill_tokens_per_s: float
    num_blocks: int
    decode_s: float = 0.02
    decode_share: float = 0.005


@dataclass(slots=True)
class Job:
    """A request at a replica. num_hit: blocks that were found."""

    name: str
    arrival: Arrival
    num_hit: int = 0
    first_token_at: float = 0.0


@dataclass(slots=True)
class SimulatedReplica:
    """Of one service. number: its name. busy_s: spent with prompts. num_computed: tokens of prompts."""

    service: Service
    number: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    waiting: deque[Job] = field(default_factory=deque)
    running: Job | None = None
    decoding: int = 0
    busy_s: float = 0.0
    num_computed: int = 0
    num_arrived: int = 0
    free_blocks: int = 0
    """Neither held nor cached. Cached ones that nobody holds are taken where there are none of these."""
    held: dict[int, int] = field(default_factory=dict)
    """Of those that are held: by how many."""
    found: set[int] = field(default_factory=set)
    """All that can be found."""
    idle: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Those that nobody holds, the least recently used first."""

    def __post_init__(self) -> None:
        self.free_blocks = self.service.num_blocks

    @property
    def num_open(self) -> int:
        """Requests there: what a queue's length is to a load balancer."""
        return len(self.waiting) + (self.running is not None) + self.decoding

    def arrive(self, job: Job) -> None:
        """A request came."""
        self.waiting.append(job)
        self.num_arrived += job.arrival.num_prompt

    def start(self) -> float | None:
        """Begin the next prompt, if none is being computed and its blocks find room: the seconds that it takes."""
        if self.running is not None or not self.waiting:
            return None
        job = self.waiting[0]
        hits = self._match(job)
        if not self._take(job, hits):
            return None
        self.waiting.popleft()
        self.running, job.num_hit = job, hits
        num_new = job.arrival.num_prompt - hits * BLOCK_TOKENS
        speed = self.service.prefill_tokens_per_s * max(0.3, 1 - self.decoding * self.service.decode_share)
        self.busy_s += num_new / speed
        self.num_computed += num_new
        return num_new / speed

    def prefilled(self, now: float) -> tuple[Job, float]:
        """The prompt is computed: its job, and the seconds until its answer ends."""
        assert self.running is not None
        job, self.running = self.running, None
        self.decoding += 1
        job.first_token_at = now
        for block in job.arrival.block_ids[job.num_hit :]:
            self.free_blocks += block in self.found  # a twin was computed meanwhile: one of both is dropped
            self._hold(block)
        return job, job.arrival.num_output * self.service.decode_s

    def ended(self, job: Job) -> None:
        """Its answer is over: give back what it held."""
        self.decoding -= 1
        self.free_blocks += self._num_own(job.arrival)
        for block in reversed(job.arrival.block_ids):
            self.held[block] -= 1
            if not self.held[block]:
                del self.held[block]
                self.idle[block] = None
        names = cast("tuple[BlockHash, ...]", job.arrival.block_ids)  # any name serves
        self.ledger.ended(job.name, job.arrival.num_prompt, BLOCK_TOKENS, names)

    def report(self, now: float) -> ReplicaReport:
        """As the real one would tell."""
        left = 0 if self.running is None else self.running.arrival.num_prompt - self.running.num_hit * BLOCK_TOKENS
        return ReplicaReport(
            taken_at=now,
            waiting_tokens=sum(job.arrival.num_prompt for job in self.waiting) + left // 2,
            tokens_per_s=self.service.prefill_tokens_per_s,
            num_requests=self.num_open,
            num_arrived_tokens=self.num_arrived,
            num_computed_tokens=self.num_computed,
            bytes_per_token=BYTES_PER_TOKEN,
            digest=self.ledger.digest(cast("set[BlockHash]", self.found).__contains__),
        )

    def _match(self, job: Job) -> int:
        most = (job.arrival.num_prompt - 1) // BLOCK_TOKENS
        blocks = job.arrival.block_ids[:most]
        return next((place for place, block in enumerate(blocks) if block not in self.found), len(blocks))

    def _num_own(self, arrival: Arrival) -> int:
        """Blocks that are never shared: of the answer, and the prompt's last."""
        return -(-(arrival.num_prompt + arrival.num_output) // BLOCK_TOKENS) - len(arrival.block_ids)

    def _take(self, job: Job, hits: int) -> bool:
        """Hold the blocks that were found and take the others; False, and nothing changed, where there is no room."""
        found = job.arrival.block_ids[:hits]
        num_idle = sum(block in self.idle for block in found)
        needed = len(job.arrival.block_ids) - hits + self._num_own(job.arrival)
        if needed > self.free_blocks + len(self.idle) - num_idle:
            assert needed + hits <= self.service.num_blocks, "a prompt that can never fit"
            return False
        for block in found:
            self._hold(block)
        while self.free_blocks < needed:
            self.found.remove(self.idle.popitem(last=False)[0])
            self.free_blocks += 1
        self.free_blocks -= needed
        return True

    def _hold(self, block: int) -> None:
        self.found.add(block)
        self.held[block] = self.held.get(block, 0) + 1
        self.idle.pop(block, None)

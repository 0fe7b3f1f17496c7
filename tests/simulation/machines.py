"""A made-up machine, on which a scheduler runs on a clock of its own: runs that are recorded, and as good as real.

It has slow whiles, jitter, moments in which all stands still, and steps whose cost is no plane over tokens, rows and
keys. Two runs meet the same whiles and moments, as two settings would that share a processor with others' work, and
draw their jitter anew.
"""

import random
from math import exp

from aserve.core.config import EngineConfig
from aserve.core.ids import BlockId, RequestId, Row, SeqId
from aserve.core.plan import SeqSlice
from aserve.recording.plans import settled
from aserve.recording.records import Arrived, Ended, Landed, Plan, Planned, Record
from aserve.simulation.costs import Costs
from aserve.simulation.meter import Figures
from aserve.simulation.simulator import Simulator
from aserve.simulation.traffic import Kind, Step, Traffic, TrafficReader
from tests.recording.recorded import header

MACHINE_SEED = 1000


class Machine(Costs):
    """What steps take on it. seconds: how long it runs at least. seed: of its whiles and moments; jitter: of a run."""

    def __init__(self, seconds: float, *, seed: int, jitter: int) -> None:
        rng, slow = random.Random(MACHINE_SEED + seed), 0.0
        self._jitter = random.Random(jitter)
        self._slow = [exp(slow := 0.95 * slow + rng.gauss(0.0, 0.06)) for _ in range(round(seconds * 10))]
        self._stills, at_s = list[tuple[float, float]](), 0.0
        while at_s < seconds:
            at_s += rng.expovariate(1 / 4.0)
            self._stills.append((at_s, at_s + rng.expovariate(1 / 0.15)))

    def seconds(self, step: Step, speed: float = 1.0) -> float:
        """Of a step that is begun at its at_s."""
        load, begins_s = step.load, step.at_s
        cost_s = 0.006 + 0.00025 * load.tokens + 0.0012 * load.rows**0.7 + 6e-7 * load.keys
        if step.kind is Kind.PROMPT:
            cost_s += 0.004 + 1e-7 * load.tokens**2
        slow = self._slow[min(len(self._slow) - 1, int(begins_s * 10))]
        ends_s = begins_s + cost_s * slow * self._jitter.lognormvariate(0.0, 0.08)
        for from_s, to_s in self._stills:
            if to_s > begins_s and from_s < ends_s:
                ends_s += to_s - max(from_s, begins_s)
        return ends_s - begins_s

    def gap_s(self, at_s: float) -> float:
        """As a loop takes."""
        return self._jitter.uniform(0.0002, 0.0006)


class RecordedRun(Simulator):
    """A simulation whose records are kept."""

    def __init__(self, traffic: Traffic, config: EngineConfig, machine: Machine) -> None:
        self._records: list[Record] = []
        super().__init__(traffic, config)
        self._costs = machine

    def _take_in(self) -> None:
        self._records += map(settled, self._told)
        super()._take_in()

    def recorded(self, traffic: Traffic) -> tuple[Figures, Traffic]:
        """Its figures, and the same traffic with the steps that it took."""
        figures, reader = self.run(), TrafficReader()
        for record in self._records:
            reader.take(record)
        return figures, traffic._replace(steps=reader.steps, figures=figures)


def random_traffic(num: int, rate: float, seed: int, config: EngineConfig) -> Traffic:
    """So many requests, at so many a second."""
    rng, at_s = random.Random(seed), 0.0
    piece = SeqSlice(SeqId(0), Row(0), 0, 8, (0,) * 8, (BlockId(1),), 1)
    records: list[Record] = [Planned(0.0, Plan(0, (piece,))), Landed(0.02, 0, 0.02, (0,))]
    for number in range(num):
        at_s += rng.expovariate(rate)
        num_prompt = min(400, max(4, round(rng.lognormvariate(4.3, 0.9))))
        num_tokens = min(160, max(4, round(rng.lognormvariate(3.6, 0.6))))
        name = RequestId(str(number))
        records.append(Arrived(at_s, name, at_s - 0.001, num_prompt, 1, num_tokens))
        records.append(Ended(at_s + 5.0, name, 0, num_tokens, 0))
    reader = TrafficReader()
    for record in records:
        reader.take(record)
    return Traffic(header(config), reader.visits, reader.steps, [], reader.meter.figures())

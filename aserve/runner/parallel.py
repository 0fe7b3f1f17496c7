"""ParallelRunner: computes plans with several ranks, of which the first is in this process.

    EngineLoop -> ParallelRunner -> rank 0: a ModelRunner, whose thread tells the others of each step, then computes it
                                    rank 1: a ModelRunner that follows, in a process of its own (ranks.py)

Rank 0's result is the step's. Knows who has to be told of what; how is the business of ranks.py and groups.py.
"""

import threading

from aserve.core.errors import AserveError
from aserve.core.ids import AdapterId
from aserve.core.plan import StepPlan
from aserve.runner.flight import StepFlight
from aserve.runner.ranks import STUCK_S, Ranks
from aserve.runner.runner import ModelRunner


class ParallelRunner:
    """A `Runner` that may be lost (`MayBeLost`), and an `AdapterStore`. first: rank 0, which tells `ranks`."""

    def __init__(self, first: ModelRunner, ranks: Ranks) -> None:
        self.first = first
        self.ranks = ranks

    @property
    def lost(self) -> AserveError | None:
        """As `MayBeLost` says."""
        return self.ranks.lost

    def launch(self, plan: StepPlan) -> StepFlight:
        """As the Protocol says."""
        return self.first.launch(plan)

    def recover(self) -> StepFlight:
        """As the Protocol says."""
        return self.first.recover()

    def load(self, adapter: AdapterId, folder: str) -> None:
        """As `AdapterStore` says: on rank 0, which refuses what is wrong with it, then on the others."""
        self.first.load(adapter, folder)
        try:
            self.ranks.load(adapter, folder)
        except BaseException:
            self.first.drop(adapter)
            raise

    def drop(self, adapter: AdapterId) -> None:
        """As `AdapterStore` says."""
        self.first.drop(adapter)

    def close(self) -> None:
        """As the Protocol says. Ranks for which a step waits in vain are killed, so that it comes back."""
        killer = threading.Timer(STUCK_S, self.ranks.kill)
        killer.daemon = True
        killer.start()
        self.first.close()
        killer.cancel()
        self.ranks.close()

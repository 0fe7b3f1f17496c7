"""PrefixRouter: aserve's Router where Serve asks for one.

    routing_stats of replicas --> Router.reported        pending request --> Ask, Target --> Router.choose --> ranks
    request routed, completed --> Router.routed, Router.completed

Serve makes one in each process that has a handle, and runs it in one event loop. Which replicas there are, and whether
one takes a request, stays Serve's business: what is given is an order to try them in.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from aserve.ray.replicas import ANYWHERE, NO_ASK, Target
from aserve.routing import Ask, ReplicaReport, Router, RouterOptions


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types here
    """Chooses by what replicas hold and have to do. See `aserve.routing.Router`."""

    def initialize_state(self, **options: Any) -> None:
        """options: the fields of `RouterOptions`. A seed of its own: routers do not draw alike."""
        self._router = Router(RouterOptions(**options), seed=secrets.randbits(64))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Which there are, and what they tell."""
        super().update_replicas(replicas)
        now = time.time()
        self._router.keep_only(name_of(replica) for replica in replicas)
        for replica in replicas:
            if (report := report_of(replica.routing_stats)) is not None:
                self._router.reported(name_of(replica), report, now)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Each is a rank of its own, the best first."""
        ask, target = terms_of(pending_request)
        by_name = {name_of(replica): replica for replica in candidate_replicas}
        names = allowed(tuple(by_name), target)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # all have been tried
        if not names:
            return []
        choice = self._router.choose(names, ask, time.time())
        return [[by_name[name]] for name in choice.ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """It may be another than the first."""
        ask, _ = terms_of(pending_request)
        self._router.routed(str(replica_id.unique_id), ask, time.time())

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Its share of the load is free."""
        self._router.completed(internal_request_id, time.time())


def name_of(replica: RunningReplica) -> str:
    """What a replica calls itself."""
    return str(replica.replica_id.unique_id)


def report_of(stats: dict[str, Any]) -> ReplicaReport | None:
    """What a replica reported; None where it has not yet, or speaks another version's language."""
    if not stats:
        return None
    try:
        return ReplicaReport.from_dict(stats)
    except ValueError:
        return None


def terms_of(pending_request: PendingRequest | None) -> tuple[Ask, Target]:
    """What the ingress said of a request; of calls that are none, that they may go anywhere."""
    if pending_request is None:
        return NO_ASK, ANYWHERE
    ask = next((each for each in pending_request.args if isinstance(each, Ask)), NO_ASK)
    target = next((each for each in pending_request.args if isinstance(each, Target)), ANYWHERE)
    return msgspec.structs.replace(ask, id=pending_request.metadata.internal_request_id), target


def allowed(names: Sequence[str], target: Target) -> Sequence[str]:
    """Those of the replicas that a request may go to."""
    if target.only:
        return [name for name in names if name == target.only]
    return [name for name in names if name not in target.avoid] or names

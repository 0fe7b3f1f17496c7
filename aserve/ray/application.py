"""application: an ingress and its replicas as a Serve application: what each reserves, and how many there are.

The replicas' proxy, health checks, draining and rolling updates are Serve's own.
"""

import asyncio
import os
import sys
from contextlib import ExitStack
from typing import Any, Final

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from aserve.cli.commands import MAX_PREPARED_PRODUCTS
from aserve.cli.flags import ServerOptions
from aserve.core.config import Options
from aserve.core.defaults import IN_MEMORY, default_max_num_queued_reqs, default_max_num_seqs
from aserve.core.errors import ConfigError
from aserve.ray.engine_replica import EngineReplica
from aserve.ray.ingress import Ingress
from aserve.ray.leaving import on_sigterm
from aserve.ray.options import SERVE_ENVIRONMENT, RayOptions
from aserve.server import logging_to

REPLICAS: Final = "replica"
INGRESS: Final = "ingress"
"""Names of the deployments."""
ROOM: Final = 64
"""Requests that a replica takes beyond those that its engine has room for: it is the engine that refuses them."""
MAX_AT_INGRESS: Final = 100_000
HEALTH_PERIOD_S: Final = 2.0
HEALTH_TIMEOUT_S: Final = 30.0
ROUTING_PERIOD_S: Final = 2.0
"""How often replicas tell what they hold. Until then the router goes by what it has sent them."""
SCALING_PERIOD_S: Final = 2.0


def application(options: Options, replicas: RayOptions, given: ServerOptions) -> Application:
    """See `aserve.ray.app`."""
    replicas.check()
    check_files(options, replicas, given)
    engines = serve.deployment(ServedReplica, name=REPLICAS).options(**deployment_options(options, replicas, given))
    ingress = serve.deployment(serve.ingress()(Ingress), name=INGRESS).options(
        num_replicas=1,
        max_ongoing_requests=MAX_AT_INGRESS,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": dict(SERVE_ENVIRONMENT)}},
        graceful_shutdown_timeout_s=given.shutdown_timeout,
    )
    return ingress.bind(engines.bind(options, given), given, replicas.retries)


def check_files(options: Options, replicas: RayOptions, given: ServerOptions) -> None:
    """Raise `ConfigError` for files that one process alone may have open, where there may be several."""
    named = {
        "--response-store": given.response_store is not None,
        "--batch-store": given.batch_store != IN_MEMORY,
        "--record": options.record is not None,
    }
    for flag, value in (("--uds", given.uds), ("--ssl-certfile", given.ssl_certfile)):
        if value is not None:
            raise ConfigError(f"{flag}: replicas are behind a proxy of Ray's, which listens on host and port")
    for flag, is_given in named.items():
        if is_given and replicas.most > 1:
            raise ConfigError(f"{flag} names a file of one process, and there may be {replicas.most} replicas")


def deployment_options(options: Options, replicas: RayOptions, given: ServerOptions) -> dict[str, Any]:
    """Serve's, of the replicas."""
    queued = options.max_num_queued_reqs
    if queued is None:
        queued = default_max_num_queued_reqs(options.max_num_seqs)
    threads = {"LRU_CACHE_CAPACITY": str(MAX_PREPARED_PRODUCTS)}
    threads["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = str(MAX_PREPARED_PRODUCTS)
    bundle = bundle_of(options, replicas)
    return {
        **numbers_of(replicas),
        "request_router_config": RequestRouterConfig(
            request_router_class="aserve.ray.router:PrefixRouter", request_routing_stats_period_s=ROUTING_PERIOD_S
        ),
        "max_ongoing_requests": (options.max_num_seqs or default_max_num_seqs()) + queued + ROOM,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "graceful_shutdown_timeout_s": given.shutdown_timeout,
        "graceful_shutdown_wait_loop_s": 0.2,
        "ray_actor_options": {
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
            "runtime_env": {"env_vars": SERVE_ENVIRONMENT | threads},
        },
        "placement_group_bundles": [bundle],
        "placement_group_strategy": "STRICT_PACK",
    }


def numbers_of(replicas: RayOptions) -> dict[str, Any]:
    """How many there are: a number, or how it follows the load. Windows of time are `FollowLoad`'s own, not Serve's."""
    if not replicas.scales:
        return {"num_replicas": replicas.least}
    policy = AutoscalingPolicy(
        policy_function="aserve.ray.autoscaling:FollowLoad",
        policy_kwargs={
            "target_wait_s": replicas.target_wait,
            "up_after_s": replicas.scale_up_after,
            "down_after_s": replicas.scale_down_after,
        },
    )
    config = AutoscalingConfig(
        min_replicas=replicas.least,
        max_replicas=replicas.most,
        metrics_interval_s=SCALING_PERIOD_S,
        look_back_period_s=2 * SCALING_PERIOD_S,
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        policy=policy,
    )
    return {"num_replicas": "auto", "autoscaling_config": config}


def bundle_of(options: Options, replicas: RayOptions) -> dict[str, float]:
    """What a replica reserves, on one node: the ranks of a model that is split are processes beside each other."""
    num_ranks = getattr(options, "tensor_parallel_size", 1) or 1
    gpus = replicas.replica_gpus
    if gpus is None:
        gpus = float(num_ranks) if options.device == "cuda" else 0.0
    bundle = {"CPU": replicas.replica_cpus * (1 if gpus else num_ranks)}
    return bundle | {"GPU": gpus} if gpus else bundle


class ServedReplica(EngineReplica):
    """An `EngineReplica` that Serve makes: it is ready when its model is loaded."""

    async def __init__(self, options: Options, given: ServerOptions) -> None:  # type: ignore[misc]  # Serve awaits it
        self._logs = ExitStack()  # for as long as the process lives
        self._logs.enter_context(logging_to(sys.stderr, given.log_level, given.log_format))
        EngineReplica.__init__(self, options, given)
        await self.enter()
        loop = asyncio.get_running_loop()

        def leave() -> None:
            asyncio.run_coroutine_threadsafe(self.leave(lambda: os._exit(0)), loop)

        on_sigterm(leave)

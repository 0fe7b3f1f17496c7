"""RayOptions: how many replicas there are, what each takes of a cluster, and which cluster that is."""

from typing import Final

import msgspec

from aserve.core.errors import ConfigError

APP_NAME: Final = "aserve"
MAX_REPLICAS: Final = 1024
SERVE_ENVIRONMENT: Final = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
}
"""Of the processes that an event passes: calls by gRPC in place of Ray's objects, one thread in place of two."""


class RayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of `aserve ray` besides those of `aserve serve`.

    replicas: a fixed number of them; min_replicas, max_replicas: bounds between which their number follows the load.
    replica_cpus, replica_gpus: that each reserves; for a GPU None is one for each rank of tensor parallelism.
    address: of a running cluster; None is the one of the environment, else a local one is started. ray_app, ray_route:
    the application's name in Serve, and the path it is served below. Times are seconds: target_wait is how long a
    prompt may wait for the tokens before it, scale_up_after and scale_down_after how long that has to hold.
    retries: how often a request that has not begun to be answered is sent to another replica. haproxy: have a cluster
    that is started here use HAProxy in the place of Serve's proxy. detach: leave the application running.
    """

    replicas: int | None = None
    min_replicas: int | None = None
    max_replicas: int | None = None
    replica_cpus: float = 1.0
    replica_gpus: float | None = None
    address: str | None = None
    ray_app: str = APP_NAME
    ray_route: str = "/"
    target_wait: float = 2.0
    scale_up_after: float = 0.0
    scale_down_after: float = 60.0
    retries: int = 2
    haproxy: bool = False
    dashboard: bool = False
    detach: bool = False

    @property
    def least(self) -> int:
        """Of the replicas that there are."""
        return self.replicas or self.min_replicas or 1

    @property
    def most(self) -> int:
        """Of them."""
        return self.replicas or self.max_replicas or self.least

    @property
    def scales(self) -> bool:
        """Whether their number follows the load."""
        return self.most > self.least

    def check(self) -> None:
        """Raise `ConfigError` for numbers that exclude each other."""
        if self.replicas is not None and (self.min_replicas is not None or self.max_replicas is not None):
            raise ConfigError("--replicas is a fixed number: leave it out, or --min-replicas and --max-replicas")
        if not 1 <= self.least <= self.most <= MAX_REPLICAS:
            raise ConfigError(
                f"--min-replicas and --max-replicas must be in [1, {MAX_REPLICAS}], the least first, "
                f"got {self.least} and {self.most}"
            )
        if not self.ray_route.startswith("/"):
            raise ConfigError(f"--ray-route must begin with a slash, got {self.ray_route!r}")

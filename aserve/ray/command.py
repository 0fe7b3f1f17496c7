"""`aserve ray run` and `aserve ray config`: replicas on Ray Serve, until a signal, and the same as Serve's YAML.

run     connect to a cluster, or start one here --> deploy, wait until all is healthy --> the URL --> signal --> end
config  print what `serve run`, `serve deploy` and KubeRay take
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from aserve import __version__
from aserve.cli.flags import ServerOptions
from aserve.cli.settings import Parsed
from aserve.core.config import Options
from aserve.core.errors import ConfigError
from aserve.ray.faults import LOGS, cluster_faults, of_deployment, with_ray
from aserve.ray.options import SERVE_ENVIRONMENT, RayOptions

IMPORT_PATH: Final = "aserve.ray:build"
PATIENCE: Final = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Of a cluster that is started here, where the environment says nothing else: on a busy machine Ray's own time-outs end
processes that are still being imported. And nobody is told that it runs."""
START_S: Final = 300.0
"""How long Serve's proxy may take to listen."""
NOT_IN_FILES: Final = frozenset({"host", "port", "ray_app", "ray_route", "address", "detach", "dashboard", "haproxy"})
"""Flags whose place is elsewhere in Serve's configuration, or nowhere."""


def run(parsed: Parsed, environ: MutableMapping[str, str]) -> int:
    """Do it; the exit status."""
    if parsed.of(ServerOptions).dry_run:
        raise ConfigError("--dry-run is of aserve serve and aserve doctor; aserve ray config shows what would be run")
    if parsed.argument == "config":
        print(config_of(parsed), end="")
        return 0
    prepare(parsed.of(RayOptions), environ)
    with with_ray():
        import ray.serve  # noqa: F401  that it is there, before anything is said
    return serve(parsed, environ)


def prepare(replicas: RayOptions, environ: MutableMapping[str, str]) -> None:
    """Tell a cluster that may be started here what it reads of the environment, as it is imported, too."""
    for name, value in (PATIENCE | SERVE_ENVIRONMENT).items():
        environ.setdefault(name, value)
    if replicas.haproxy:
        environ.setdefault("RAY_SERVE_ENABLE_HA_PROXY", "1")


def config_of(parsed: Parsed) -> str:
    """Serve's configuration file for these flags."""
    import yaml

    replicas, server = parsed.of(RayOptions), parsed.of(ServerOptions)
    application = {
        "name": replicas.ray_app,
        "route_prefix": replicas.ray_route,
        "import_path": IMPORT_PATH,
        "args": arguments_of(parsed),
    }
    http = {"host": server.host, "port": server.port}
    content = {"proxy_location": "EveryNode", "http_options": http, "applications": [application]}
    return f"# Made by aserve {__version__}: aserve ray config\n" + str(yaml.safe_dump(content, sort_keys=False))


def arguments_of(parsed: Parsed) -> dict[str, Any]:
    """All flags that are not at their defaults, by name, as a file of --config has them."""
    found = {}
    for kind, group in parsed.groups.items():
        defaults = kind() if kind is not Options else Options(model=parsed.of(Options).model)
        for name in kind.__struct_fields__:
            value = getattr(group, name)
            if name not in NOT_IN_FILES and (name == "model" or value != getattr(defaults, name)):
                found[name] = msgspec.to_builtins(value)
    return found


def serve(parsed: Parsed, environ: MutableMapping[str, str]) -> int:
    """Deploy, tell the URL, and wait for a signal. What was started here ends with it."""
    from ray import serve as serving

    from aserve.ray.application import application

    replicas, server = parsed.of(RayOptions), parsed.of(ServerOptions)
    app = application(parsed.of(Options), replicas, server)
    check_free(server.host, server.port)
    with cluster(replicas, environ) as is_ours:
        if is_ours:
            check_fits(parsed.of(Options), replicas)
        say(f"starting {replicas.least} replica{'s' if replicas.least > 1 else ''}; {LOGS}")
        with cluster_faults("starting Serve"):
            start_proxy(server.host, server.port)
        deploy(app, replicas)
        say(f"ready: http://{server.host}:{server.port}{replicas.ray_route.rstrip('/')}")
        if replicas.detach and not is_ours:
            return 0
        wait_for_signal()
        say("ending: open requests are finished")
        serving.delete(replicas.ray_app)
        if is_ours:
            serving.shutdown()
    return 0


def deploy(app: Any, replicas: RayOptions) -> None:
    """Have Serve run it, and wait until it does. Raises `ConfigError` where a replica cannot start."""
    from ray import serve as serving

    try:
        serving.run(app, name=replicas.ray_app, route_prefix=replicas.ray_route, blocking=False)
    except RuntimeError as error:  # all of Serve's own are
        status = serving.status().applications.get(replicas.ray_app)
        told = [each.message for each in status.deployments.values() if each.message] if status else []
        raise ConfigError(f"a replica did not start: {of_deployment((told or [str(error)])[0])}") from error


def check_fits(options: Options, replicas: RayOptions) -> None:
    """Raise `ConfigError` for replicas that this machine has no room for: Serve would wait for a larger one."""
    import ray

    from aserve.ray.application import bundle_of

    has = ray.cluster_resources()
    for name, amount in bundle_of(options, replicas).items():
        if amount * replicas.least > has.get(name, 0.0):
            raise ConfigError(
                f"{replicas.least} replicas reserve {amount * replicas.least:g} {name}, and this machine has "
                f"{has.get(name, 0.0):g}; see --replicas, --replica-cpus and --replica-gpus"
            )


def start_proxy(host: str, port: int) -> None:
    """Start Serve, and wait until its proxy listens. Raises what Ray raises, and `TimeoutError`."""
    from ray import serve as serving
    from ray.exceptions import GetTimeoutError

    try:
        serving.start(http_options={"host": host, "port": port, "location": "HeadOnly"})
    except (GetTimeoutError, TimeoutError):  # after a minute, which a busy machine needs to import it
        serving.start()
    end_s = time.monotonic() + START_S
    while not listens(host, port):
        if time.monotonic() > end_s:
            raise TimeoutError(f"Serve's proxy does not listen on {host}:{port} after {START_S:g} s")
        time.sleep(0.2)


def listens(host: str, port: int) -> bool:
    """Whether somebody does."""
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def say(line: str) -> None:
    """To whoever watches the terminal."""
    print(f"aserve: {line}", file=sys.stderr, flush=True)


@contextmanager
def cluster(replicas: RayOptions, environ: MutableMapping[str, str]) -> Iterator[bool]:
    """A connection to a cluster, while the block runs; whether it was started for it. Raises `ConfigError`."""
    import ray

    address = replicas.address or environ.get("RAY_ADDRESS")
    check_address(address)
    with cluster_faults("connecting" if address else "starting a cluster"):
        if address is None:
            try:
                ray.init(address="auto", log_to_driver=False, configure_logging=False)
                is_ours = False
            except ConnectionError:
                ray.init(log_to_driver=False, configure_logging=False, include_dashboard=replicas.dashboard)
                is_ours = True
        else:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
            is_ours = False
    say(
        f"Ray {ray.__version__}: "
        + ("a cluster of this machine, which ends with this command" if is_ours else "connected")
    )
    if replicas.detach and is_ours:
        ray.shutdown()
        raise ConfigError(
            "--detach needs a cluster that goes on (ray start --head): one that is started here ends here"
        )
    try:
        yield is_ours
    finally:
        ray.shutdown()


def check_address(address: str | None) -> None:
    """Raise `ConfigError` for a host and port where nobody listens: Ray itself would try for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if "/" in host or not colon:
        return
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--address must be a host and a port, such as 10.0.0.1:6379, or auto, got {address!r}")
    if not listens(host, int(port)):
        raise ConfigError(f"connecting: no Ray cluster answers at {address}; is it the address that ray start printed?")


def check_free(host: str, port: int) -> None:
    """Raise `ConfigError` where something listens already: Serve's proxy would only say so in its log."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}") from None


def wait_for_signal() -> None:
    """Until SIGINT or SIGTERM; a second one ends the process at once."""
    asked = threading.Event()

    def heard(signum: int, _frame: object) -> None:
        if asked.is_set():
            os._exit(128 + signum)
        asked.set()

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, heard)
    asked.wait()

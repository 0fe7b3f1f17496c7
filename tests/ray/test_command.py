"""The commands of `aserve ray` beside a made-up Ray: what is printed, which cluster is taken, how it is left."""

import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import yaml

from aserve.cli.settings import parse_command
from aserve.core.errors import ConfigError
from aserve.ray.command import cluster, deploy, run, wait_for_signal
from aserve.ray.options import RayOptions

WAITING = """
import threading
from aserve.ray.command import wait_for_signal
wait = threading.Event.wait
threading.Event.wait = lambda event: (print("waits", flush=True), wait(event))
wait_for_signal()
print("ended by itself", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_ends_it_in_its_own_way(signum):
    with subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = iter(child.stdout)
        assert next(lines) == "waits\n"
        child.send_signal(signum)
        assert next(lines) == "ended by itself\n"
    assert child.returncode == 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once(monkeypatch, signum):
    handlers, exits, listens = {}, [], threading.Event()

    def note(each, handler):
        handlers[each] = handler
        if len(handlers) == 2:
            listens.set()

    monkeypatch.setattr(signal, "signal", note)
    monkeypatch.setattr("os._exit", exits.append)
    waiting = threading.Thread(target=wait_for_signal)
    waiting.start()
    assert listens.wait(60)
    handlers[signum](signum, None)
    waiting.join(60)
    assert (waiting.is_alive(), exits) == (False, [])
    handlers[signum](signum, None)
    assert exits == [128 + signum]


class FakeRay(SimpleNamespace):
    """Connects to whatever it is told, and starts a cluster where it is told of none; notes what it is asked."""

    __version__ = "1.2.3"

    def __init__(self, *, is_running: bool) -> None:
        super().__init__()
        self.is_running = is_running
        self.asked: list[str] = []

    def init(self, address: str = "none", **_options: object) -> None:
        self.asked.append(address)
        if address == "auto" and not self.is_running:
            raise ConnectionError

    def shutdown(self) -> None:
        self.asked.append("shutdown")


@pytest.fixture
def fake_ray(monkeypatch):
    def make(*, is_running):
        ray = FakeRay(is_running=is_running)
        monkeypatch.setitem(sys.modules, "ray", ray)
        return ray

    return make


def test_config_prints_the_file_and_starts_nothing(capsys):
    assert run(parse_command(["ray", "config", "--model", "demo", "--port", "9"], {}), {}) == 0
    assert yaml.safe_load(capsys.readouterr().out)["http_options"]["port"] == 9


@pytest.mark.parametrize(
    ("address", "is_running", "is_ours", "asked", "told"),
    [
        (None, True, False, ["auto"], "connected"),
        (None, False, True, ["auto", "none"], "a cluster of this machine, which ends with this command"),
        ("there", True, False, ["there"], "connected"),
    ],
)
def test_a_cluster_that_is_there_is_taken_and_else_one_is_started(
    fake_ray, capsys, address, is_running, is_ours, asked, told
):
    ray = fake_ray(is_running=is_running)
    with cluster(RayOptions(address=address), {}) as found:
        assert found is is_ours
        assert ray.asked == asked
    assert ray.asked == [*asked, "shutdown"]
    assert capsys.readouterr().err == f"aserve: Ray 1.2.3: {told}\n"


def test_nothing_is_left_running_on_a_cluster_that_ends_with_the_command(fake_ray):
    ray = fake_ray(is_running=False)
    with (
        pytest.raises(ConfigError, match="--detach needs a cluster that goes on"),
        cluster(RayOptions(detach=True), {}),
    ):
        pytest.fail("it was yielded")
    assert ray.asked[-1] == "shutdown"
    connected = fake_ray(is_running=True)
    with cluster(RayOptions(detach=True), {}):
        pass
    assert connected.asked == ["auto", "shutdown"]


class FakeServe(SimpleNamespace):
    """Runs what it is given, or says of a deployment why not."""

    def __init__(self, told: str = "") -> None:
        super().__init__()
        self.told, self.ran = told, []

    def run(self, app: object, **how: object) -> None:
        self.ran.append((app, how))
        if self.told:
            raise RuntimeError("deploying failed")

    def status(self) -> SimpleNamespace:
        deployments = {"replicas": SimpleNamespace(message=self.told)}
        return SimpleNamespace(applications={RayOptions().ray_app: SimpleNamespace(deployments=deployments)})


def test_what_is_deployed_is_run_by_serve_at_its_place(monkeypatch):
    serving = FakeServe()
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=serving))
    deploy("app", RayOptions())
    how = {"name": RayOptions().ray_app, "route_prefix": RayOptions().ray_route, "blocking": False}
    assert serving.ran == [("app", how)]


def test_a_replica_that_does_not_start_is_told_by_its_deployment(monkeypatch):
    serving = FakeServe("no such model")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=serving))
    with pytest.raises(ConfigError, match="a replica did not start: no such model"):
        deploy("app", RayOptions())

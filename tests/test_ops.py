"""ops/: what containers, systemd and Kubernetes run is what aserve understands, and what they ask of it exists."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.routing import Route

from aserve.build import AsyncEngine
from aserve.cli.command_table import ALL_NAMES
from aserve.cli.flags import ServerOptions
from aserve.cli.settings import ENV_PREFIX, parse
from aserve.http import Keyring, create_app
from tests.e2e.server_process import serving

ROOT = Path(__file__).parent.parent
OPS = ROOT / "ops"
CONTAINERFILES = sorted((OPS / "container").glob("Containerfile.*"))
COMPOSE = yaml.safe_load((OPS / "container" / "compose.yaml").read_text())
DEPLOYMENT, SERVICE = yaml.safe_load_all((OPS / "kubernetes" / "aserve.yaml").read_text())
UNIT = OPS / "systemd" / "aserve.service"
SPARE_S = 5
"""That the end may take besides the delay and the time for open requests."""


def instructions(path: Path) -> list[tuple[str, str]]:
    """Of a Containerfile: each with what follows it, continued lines joined."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def last_stage(path: Path) -> dict[str, str]:
    """What the image's last stage says, by instruction; of several the last."""
    lines = instructions(path)
    start = max(number for number, (word, _) in enumerate(lines) if word == "FROM")
    return dict(lines[start:])


def environment(path: Path) -> dict[str, str]:
    pairs = (word.partition("=") for word in shlex.split(last_stage(path)["ENV"]))
    return {name: value for name, _, value in pairs}


def unit() -> dict[str, list[str]]:
    """The unit's settings, each with all its values."""
    settings: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            settings.setdefault(name, []).append(value)
    return settings


def served(*argv: str, **environ: str) -> ServerOptions:
    """What a server is started with; every word of it is one that aserve knows."""
    assert {name.removeprefix(ENV_PREFIX).lower() for name in environ} <= set(ALL_NAMES)
    command, _, options = parse(argv, environ)
    assert command == "serve"
    return options


def get_paths() -> set[str]:
    return {route.path for route in create_app(AsyncEngine("demo")).routes if isinstance(route, Route)}


def end_s(options: ServerOptions) -> float:
    """How long an end may take."""
    return options.drain_delay + options.shutdown_timeout + SPARE_S


def seconds(word: str) -> float:
    return float(word.removesuffix("s"))


def of_image(path: Path) -> ServerOptions:
    stage = last_stage(path)
    words = [*json.loads(stage["ENTRYPOINT"]), *json.loads(stage["CMD"])]
    assert words.pop(0) == "aserve"
    given = {name: value for name, value in environment(path).items() if name.startswith(ENV_PREFIX)}
    return served(*words, **given)


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.suffix)
class TestContainerfile:
    def test_it_serves_to_all_at_the_port_that_it_names(self, path):
        options = of_image(path)
        assert options.host == "0.0.0.0"
        assert str(options.port) == last_stage(path)["EXPOSE"]

    def test_it_runs_as_nobody_of_rights_and_is_told_to_drain(self, path):
        stage = last_stage(path)
        assert int(stage["USER"].partition(":")[0]) > 0
        assert stage["STOPSIGNAL"] == "SIGTERM"

    def test_its_health_is_asked_where_it_is_told(self, path):
        (port, where) = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", last_stage(path)["HEALTHCHECK"]).groups()
        assert port == last_stage(path)["EXPOSE"]
        assert where in get_paths()

    def test_what_it_copies_is_there_and_let_through(self, path):
        ignored = (ROOT / ".dockerignore").read_text().splitlines()
        for word, rest in instructions(path):
            if word == "COPY" and not rest.startswith("--from"):
                for name in shlex.split(rest)[:-1]:
                    assert (ROOT / name).exists(), name
                    assert f"!{name}" in ignored

    def test_it_says_how_long_the_end_may_take(self, path):
        (grace,) = re.findall(r"--stop-timeout (\d+)", path.read_text()) or [COMPOSE["x-aserve"]["stop_grace_period"]]
        assert seconds(grace) >= end_s(of_image(path))


def test_compose_builds_what_is_there_and_waits_for_the_end():
    for service in COMPOSE["services"].values():
        context = OPS / "container" / service["build"]["context"]
        path = context / service["build"]["dockerfile"]
        assert path.resolve() in CONTAINERFILES
        assert seconds(service["stop_grace_period"]) >= end_s(of_image(path))
        assert service["ports"][0].endswith(f":{last_stage(path)['EXPOSE']}")
        assert service["volumes"][0].partition(":")[2] == last_stage(path)["VOLUME"]
        assert {volume.partition(":")[0] for volume in service["volumes"][:1]} == set(COMPOSE["volumes"])


def test_the_unit_starts_reloads_and_ends_what_is_there():
    settings = unit()
    program, *words = shlex.split(settings["ExecStart"][0])
    assert program.endswith("/bin/aserve")
    (config,) = (word for word in words if word.endswith(".yaml"))
    options = served(*[str(OPS / "systemd" / "aserve.yaml") if word == config else word for word in words])
    assert "HUP" in settings["ExecReload"][0]
    assert options.api_keys_file is not None, "without it SIGHUP reads nothing"
    assert seconds(settings["TimeoutStopSec"][0]) >= end_s(options)
    assert settings["KillSignal"] == ["SIGTERM"]
    assert settings["Restart"] == ["on-failure"]
    for name in (config, options.api_keys_file):
        assert (OPS / "systemd" / Path(name).name).exists()
        assert name in UNIT.read_text().partition("[Unit]")[0], "it is told how it gets there"
    assert f"u {settings['User'][0]} " in (OPS / "systemd" / "aserve.sysusers").read_text()


def test_the_example_of_a_keys_file_is_one():
    engine = AsyncEngine("demo")
    keyring = Keyring((), path=str(OPS / "systemd" / "keys.yaml"), tenants=engine.tenants)
    assert not keyring.is_open


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd")
def test_systemd_understands_the_unit(tmp_path):
    here = tmp_path / "aserve.service"
    here.write_text(UNIT.read_text().replace("/opt/aserve/bin/aserve", sys.executable))
    verify = ["systemd-analyze", "verify", str(here)]
    done = subprocess.run(verify, capture_output=True, text=True, check=False, timeout=60)
    assert [line for line in (done.stdout + done.stderr).splitlines() if "aserve" in line] == []
    assert done.returncode == 0


def probes() -> list[dict[str, Any]]:
    (container,) = DEPLOYMENT["spec"]["template"]["spec"]["containers"]
    return [container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")]


def test_kubernetes_starts_asks_and_ends_what_is_there():
    pod = DEPLOYMENT["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = served("serve", *container["args"])
    (port,) = container["ports"]
    assert port["containerPort"] == options.port
    assert pod["terminationGracePeriodSeconds"] >= end_s(options)
    startup, readiness, liveness = probes()
    assert {probe["httpGet"]["port"] for probe in probes()} == {port["name"]}
    assert {probe["httpGet"]["path"] for probe in probes()} <= get_paths()
    assert (readiness["httpGet"]["path"], liveness["httpGet"]["path"]) == ("/ready", "/health")
    notices_s = readiness["periodSeconds"] * readiness["failureThreshold"] + readiness["timeoutSeconds"]
    assert options.drain_delay >= notices_s, "requests come until the pod is known to be unready"
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 300


def test_kubernetes_puts_its_own_variables_in_nobodys_way():
    """A service named aserve is told to pods as ASERVE_PORT=tcp://..., which aserve would take for its port."""
    assert f"{SERVICE['metadata']['name'].upper()}_PORT" == f"{ENV_PREFIX}PORT"
    assert DEPLOYMENT["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_kubernetes_finds_the_pods_and_what_they_mount():
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"] == SERVICE["spec"]["selector"] == labels
    pod = DEPLOYMENT["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    options = served("serve", *container["args"])
    assert any(str(options.api_keys_file).startswith(mount["mountPath"]) for mount in container["volumeMounts"])
    (port,) = container["ports"]
    assert SERVICE["spec"]["ports"][0]["targetPort"] == port["name"]
    uid = pod["securityContext"]["runAsUser"]
    assert all(last_stage(path)["USER"].startswith(f"{uid}:") for path in CONTAINERFILES)


@pytest.mark.e2e
@pytest.mark.slow
def test_the_images_health_check_says_yes_and_no():
    """With the server that the image starts, and without."""
    (path,) = (path for path in CONTAINERFILES if path.suffix == ".cpu")
    check = json.loads(last_stage(path)["HEALTHCHECK"].partition("CMD ")[2])
    given = {name: value for name, value in environment(path).items() if name.startswith(ENV_PREFIX)}
    with serving(**given) as server:
        server.wait_until_ready()
        port = server.url.rpartition(":")[2]
        words = [sys.executable, *(word.replace("8000", port) for word in check[1:])]
        assert subprocess.run(words, env=os.environ, check=False, timeout=60).returncode == 0
    assert subprocess.run(words, check=False, timeout=60, stderr=subprocess.DEVNULL).returncode != 0

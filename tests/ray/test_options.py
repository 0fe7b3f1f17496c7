"""What aserve ray decides without Ray: its command line and file, its lines for Ray's faults, how many replicas."""

import sys
import types

import pytest
import yaml

from aserve.cli.flags import ServerOptions
from aserve.cli.settings import parse_command, parse_mapping
from aserve.core.config import Options
from aserve.core.errors import ConfigError
from aserve.ray import app, build
from aserve.ray.autoscaling import FollowLoad, loads_of
from aserve.ray.command import check_address, config_of
from aserve.ray.faults import of_deployment, told, with_ray
from aserve.ray.leaving import RAISER, on_sigterm
from aserve.ray.metric_texts import labelled
from aserve.ray.options import RayOptions
from aserve.routing import ReplicaLoad


def parsed(*words: str):
    return parse_command(["ray", "run", *words], {})


def test_the_flags_of_serve_and_of_replicas_are_read():
    found = parsed("--model", "demo", "--replicas", "2", "--max-num-seqs", "7", "--port", "9")
    assert found.argument == "run"
    assert (found.of(RayOptions).least, found.of(RayOptions).most, found.of(RayOptions).scales) == (2, 2, False)
    assert (found.of(Options).max_num_seqs, found.of(ServerOptions).port) == (7, 9)
    bounds = parsed("--min-replicas", "2", "--max-replicas", "5").of(RayOptions)
    assert (bounds.least, bounds.most, bounds.scales) == (2, 5, True)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--replicas", "2", "--max-replicas", "3"], "--replicas"),
        (["--min-replicas", "3", "--max-replicas", "2"], "got 3 and 2"),
        (["--replicas", "2000"], "[1, 1024]"),
        (["--ray-route", "x"], "--ray-route"),
        (["--target-wait", "0"], "--target-wait"),
    ],
)
def test_numbers_that_exclude_each_other_are_one_line(words, named):
    with pytest.raises(ConfigError) as caught:
        parsed(*words)
    assert named in caught.value.message
    assert "\n" not in caught.value.message


def test_the_file_says_what_the_flags_say():
    """Catches a flag that is lost on the way into Serve's configuration and back."""
    words = ["--replicas", "2", "--max-num-seqs", "7", "--api-key", "a", "b", "--no-ui", "--port", "9"]
    found = parsed("--model", "demo", *words)
    content = yaml.safe_load(config_of(found))
    assert content["http_options"] == {"host": "127.0.0.1", "port": 9}
    [application] = content["applications"]
    assert application["import_path"] == "aserve.ray:build"
    again = parse_mapping("ray", application["args"], "args")
    for kind in (Options, RayOptions):
        assert again.of(kind) == found.of(kind)
    assert (again.of(ServerOptions).api_key, again.of(ServerOptions).ui) == (("a", "b"), False)
    with pytest.raises(ConfigError, match="args: unknown option max_num_seq"):
        parse_mapping("ray", {"max_num_seq": 3}, "args")


def test_a_flag_at_its_default_is_not_in_the_file():
    """It goes by the defaults of the version that reads it; the model is named in any case."""
    [application] = yaml.safe_load(config_of(parsed("--max-num-seqs", "7", "--no-ui", "--port", "9")))["applications"]
    assert application["args"] == {"model": "demo", "max_num_seqs": 7, "ui": False}


def test_what_the_file_says_of_engines_replicas_and_apis_goes_to_each(monkeypatch):
    """Ray's own part is a fake here, which gives back what it is asked for."""
    fake = types.SimpleNamespace(application=lambda *given: given)
    monkeypatch.setitem(sys.modules, "aserve.ray.application", fake)
    options, replicas, server = build({"max_num_seqs": 7, "replicas": 2, "ui": False})
    assert (options.max_num_seqs, replicas.least, server.ui) == (7, 2, False)
    assert app(options) == (options, RayOptions(), ServerOptions())
    assert app(options, replicas, server) == (options, replicas, server)


def test_an_absent_ray_is_one_line():
    with pytest.raises(ConfigError, match=r"pip install 'aserve\[ray\]'"), with_ray():
        raise ModuleNotFoundError("No module named 'ray'", name="ray.serve")
    with pytest.raises(ModuleNotFoundError), with_ray():
        raise ModuleNotFoundError("No module named 'x'", name="x")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ConnectionError("Could not find any running Ray instance. Please specify"), "ray start --head"),
        (RuntimeError("Failed to bind to address '127.0.0.1:8000'."), "--port"),
        (ConnectionError("Failed to connect to GCS at address 10.0.0.1:6379"), "no Ray cluster answers"),
        (Exception("The current node timed out during startup."), "did not start in time"),
        (ValueError("what\nelse " + "x" * 1000), "ValueError: what else"),
    ],
)
def test_faults_of_ray_are_one_line(error, says):
    line = told("connecting", error)
    assert line.startswith("connecting: ")
    assert says in line
    assert "\n" not in line
    assert len(line) < 500


@pytest.mark.parametrize(
    ("address", "says"), [("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"), ("host:x", "--address must be")]
)
def test_an_address_where_nobody_listens_is_one_line(address, says):
    with pytest.raises(ConfigError, match=says):
        check_address(address)
    check_address("auto")
    check_address(None)


def test_a_replica_that_does_not_start_says_why():
    trace = "Traceback:\n  File x\naserve.core.errors.CheckpointError: model: there is no folder x\n"
    assert of_deployment(trace) == "model: there is no folder x"
    assert of_deployment("") == "no reason was told"


def test_sigterm_is_heard_once_and_ends_the_second_time():
    calls: list[object] = []
    module = types.SimpleNamespace(**{RAISER: lambda *arguments, **_: calls.append(("ends", arguments))})
    assert on_sigterm(lambda: calls.append("leaves"), module)
    for _ in range(2):
        getattr(module, RAISER)("The process receives a SIGTERM.", exit_code=1)
    assert calls == ["leaves", ("ends", ("The process receives a SIGTERM.",))]
    assert not on_sigterm(lambda: None, types.SimpleNamespace())


@pytest.mark.parametrize(
    ("sample", "with_label"),
    [
        ("a 1", 'a{replica="r"} 1'),
        ("a{} 1", 'a{replica="r"} 1'),
        ('a{b="{c} d"} 1', 'a{replica="r",b="{c} d"} 1'),
    ],
)
def test_a_sample_has_its_replica_as_a_label(sample, with_label):
    assert labelled(sample, "r") == with_label


def context(loads: dict[str, ReplicaLoad], target: int, now: float, state: dict):
    stats = {name: load.to_stats() for name, load in loads.items()}
    names = next(iter(stats.values())).keys()
    return types.SimpleNamespace(
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
        aggregated_metrics={each: {name: told[each] for name, told in stats.items()} for each in names},
        target_num_replicas=target,
        policy_state=state,
        current_time=now,
        total_queued_requests=0,
    )


def test_the_number_of_replicas_follows_the_tokens():
    """Catches a policy that forgets what it knew, or takes one metric for another."""
    policy = FollowLoad(target_wait_s=2.0, up_after_s=0.0, down_after_s=10.0)
    busy = {name: ReplicaLoad(waiting_tokens=4000, tokens_per_s=1000.0, num_requests=9) for name in ("a", "b")}
    wanted, state = policy(context(busy, 2, 100.0, {}))
    assert wanted == 4
    idle = {name: ReplicaLoad(tokens_per_s=1000.0) for name in ("a", "b", "c", "d")}
    numbers = []
    for now in range(102, 130, 2):
        wanted, state = policy(context(idle, 4, float(now), state))
        numbers.append(wanted)
    assert (numbers[0], numbers[-1]) == (4, 1)
    assert loads_of({"waiting_tokens": {"a": 3.0}})["a"].waiting_tokens == 3.0

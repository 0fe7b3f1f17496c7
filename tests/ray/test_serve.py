"""What Serve is told, and what is made of what it tells, beside a made-up Ray: the gate has no other."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from aserve.cli.flags import ServerOptions
from aserve.core.config import Options
from aserve.core.errors import ConfigError, UnavailableError
from aserve.ray.carried import Head, Tail
from aserve.ray.options import SERVE_ENVIRONMENT, RayOptions
from aserve.ray.replicas import ANYWHERE, NO_ASK, ReplicaLost, Target
from aserve.routing import Ask, ReplicaReport

OURS = ("application", "router", "handle", "ingress")
GIVEN = ServerOptions()


class Settings(SimpleNamespace):
    """Any of Serve's configurations: what it was made with."""


class Deployment:
    """Of a class by a name; what it was told, and bound to."""

    def __init__(self, target: type, name: str) -> None:
        self.target, self.name = target, name
        self.told: dict[str, Any] = {}
        self.bound: tuple[Any, ...] = ()

    def options(self, **told: Any) -> "Deployment":
        self.told = told
        return self

    def bind(self, *bound: Any) -> "Deployment":
        self.bound = bound
        return self


class TaskError(Exception):
    """What a replica raised, as Ray wraps it."""

    def as_instanceof_cause(self) -> BaseException:
        cause = self.__cause__
        assert cause is not None
        return cause


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of that name, and ours that import them made anew beside these."""
    errors = {name: type(name, (Exception,), {}) for name in ("RayError", "RayActorError", "RayServeException")}
    anything = dict.fromkeys(("PendingRequest", "ReplicaID", "ReplicaResult", "RunningReplica"), Any)
    serve = {"deployment": Deployment, "ingress": lambda *_: lambda target: target, "Application": Any}
    modules = {
        "ray": {},
        "ray.exceptions": errors | {"RayTaskError": TaskError},
        "ray.serve": serve,
        "ray.serve.config": dict.fromkeys(("AutoscalingConfig", "AutoscalingPolicy", "RequestRouterConfig"), Settings),
        "ray.serve.exceptions": errors,
        "ray.serve.handle": dict.fromkeys(("DeploymentHandle", "DeploymentResponseGenerator"), list),
        "ray.serve.request_router": anything | {"RequestRouter": RequestRouter},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys.modules["ray"], "serve", sys.modules["ray.serve"], raising=False)
    with forgotten():
        yield


@contextmanager
def forgotten() -> Iterator[None]:
    names = [f"aserve.ray.{name}" for name in OURS]
    kept = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(kept)


class RequestRouter:
    """Serve's, of which ours is made."""

    def update_replicas(self, replicas: list[Any]) -> None:
        self.replicas = replicas


# ---- the application


def engines_of(options: Options, replicas: RayOptions, given: ServerOptions = GIVEN) -> Deployment:
    app = import_module("aserve.ray.application").application(options, replicas, given)
    engines: Deployment = app.bound[0]
    assert app.bound == (engines, given, replicas.retries)
    assert (app.name, engines.name) == ("ingress", "replica")
    assert app.told["num_replicas"] == 1
    assert app.told["ray_actor_options"] == {"num_cpus": 0, "runtime_env": {"env_vars": SERVE_ENVIRONMENT}}
    assert engines.bound == (options, given)
    return engines


def test_a_fixed_number_of_replicas_reserve_what_they_take():
    options = Options(model="demo", max_num_seqs=8, max_num_queued_reqs=30)
    told = engines_of(options, RayOptions(replicas=3, replica_cpus=2.0, retries=5)).told
    assert told["num_replicas"] == 3
    assert told["placement_group_bundles"] == [{"CPU": 2.0}]
    assert {name: told["ray_actor_options"][name] for name in ("num_cpus", "num_gpus")} == {
        "num_cpus": 2.0,
        "num_gpus": 0,
    }
    assert told["max_ongoing_requests"] == 8 + 30 + 64
    assert told["request_router_config"].request_router_class == "aserve.ray.router:PrefixRouter"
    assert told["graceful_shutdown_timeout_s"] == GIVEN.shutdown_timeout


@pytest.mark.parametrize(
    ("options", "replicas", "bundle"),
    [
        (Options(model="m", tensor_parallel_size=2, device="cpu"), RayOptions(), {"CPU": 2.0}),
        (Options(model="m", tensor_parallel_size=2, device="cuda"), RayOptions(), {"CPU": 1.0, "GPU": 2.0}),
        (Options(model="m", device="cuda"), RayOptions(replica_gpus=0.5), {"CPU": 1.0, "GPU": 0.5}),
        (Options(model="m", device="cuda"), RayOptions(replica_gpus=0.0), {"CPU": 1.0}),
    ],
)
def test_ranks_of_a_model_that_is_split_are_together(options: Options, replicas: RayOptions, bundle: dict[str, float]):
    told = engines_of(options, replicas).told
    assert told["placement_group_bundles"] == [bundle]
    assert told["placement_group_strategy"] == "STRICT_PACK"
    assert told["ray_actor_options"]["num_gpus"] == bundle.get("GPU", 0)


def test_between_bounds_their_number_follows_the_load():
    replicas = RayOptions(min_replicas=2, max_replicas=5, target_wait=3.0, scale_up_after=4.0, scale_down_after=5.0)
    told = engines_of(Options(model="demo"), replicas).told
    config = told["autoscaling_config"]
    assert told["num_replicas"] == "auto"
    assert (config.min_replicas, config.max_replicas) == (2, 5)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (0.0, 0.0), "windows of time are FollowLoad's"
    assert config.policy.policy_function == "aserve.ray.autoscaling:FollowLoad"
    assert config.policy.policy_kwargs == {"target_wait_s": 3.0, "up_after_s": 4.0, "down_after_s": 5.0}


@pytest.mark.parametrize(
    ("options", "given", "flag"),
    [
        ({"record": "a.rec"}, {}, "--record"),
        ({}, {"response_store": "a.db"}, "--response-store"),
        ({}, {"batch_store": "a.db"}, "--batch-store"),
    ],
)
def test_a_file_of_one_process_is_not_for_several_replicas(options: dict[str, str], given: dict[str, str], flag: str):
    parts = Options(model="demo", **options), ServerOptions(**given)
    engines_of(parts[0], RayOptions(replicas=1), parts[1])
    with pytest.raises(ConfigError, match=f"{flag} names a file of one process, and there may be 3 replicas"):
        engines_of(parts[0], RayOptions(max_replicas=3), parts[1])


@pytest.mark.parametrize("given", [{"uds": "/a/socket"}, {"ssl_certfile": "a.pem"}])
def test_replicas_listen_where_rays_proxy_does(given: dict[str, str]):
    with pytest.raises(ConfigError, match="replicas are behind a proxy of Ray's"):
        engines_of(Options(model="demo"), RayOptions(), ServerOptions(**given))


# ---- the router


def replica(name: str, **stats: Any) -> SimpleNamespace:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=stats)


def pending(*args: Any, id: str = "r") -> SimpleNamespace:
    return SimpleNamespace(
        args=args,
        metadata=SimpleNamespace(internal_request_id=id),
        routing_context=SimpleNamespace(should_backoff=False),
    )


def test_what_the_ingress_said_of_a_request_is_found_among_its_arguments():
    module = import_module("aserve.ray.router")
    ask, target = Ask(id="", session="s"), Target(avoid=("a",))
    assert module.terms_of(pending("carried", ask, target, id="7")) == (Ask(id="7", session="s"), target)
    assert module.terms_of(pending("carried", id="7")) == (Ask(id="7"), ANYWHERE)
    assert module.terms_of(None) == (NO_ASK, ANYWHERE)


@pytest.mark.parametrize(
    ("target", "names"),
    [
        (ANYWHERE, ["a", "b"]),
        (Target(only="b"), ["b"]),
        (Target(only="c"), []),
        (Target(avoid=("a",)), ["b"]),
        (Target(avoid=("a", "b")), ["a", "b"]),
    ],
)
def test_where_a_request_may_go(target: Target, names: list[str]):
    assert list(import_module("aserve.ray.router").allowed(("a", "b"), target)) == names


def test_a_report_of_another_version_is_none():
    report_of = import_module("aserve.ray.router").report_of
    assert report_of({}) is None
    assert report_of({"adapters": 5}) is None
    report = ReplicaReport(taken_at=1.0)
    assert report_of(report.to_dict()) == report


async def test_all_that_may_have_a_request_are_ranked_and_who_has_its_session_is_first():
    router = import_module("aserve.ray.router").PrefixRouter()
    router.initialize_state()
    replicas = [replica(name, **ReplicaReport(taken_at=1.0).to_dict()) for name in "abc"]
    router.update_replicas(replicas)
    assert router.replicas is replicas
    ask = Ask(id="", session="s")
    [[first], *_] = ranked = await router.choose_replicas(replicas, pending(ask, id="1"))
    assert sorted(each.replica_id.unique_id for [each] in ranked) == ["a", "b", "c"]
    router.on_request_routed(pending(ask, id="1"), first.replica_id, None)
    router.on_request_completed(first.replica_id, "1")
    for number in range(8):
        again = pending(ask, id=f"again {number}")
        assert (await router.choose_replicas(replicas, again))[0] == [first]
        assert again.routing_context.should_backoff
    assert await router.choose_replicas(replicas, pending(Ask(id=""), Target(only="elsewhere"))) == []
    assert len(await router.choose_replicas(replicas)) == 3


# ---- the handle


class Handle:
    """Of replicas whose answers are scripted: items, and what is raised."""

    def __init__(self, *script: Any, all_say: tuple[Any, ...] = ()) -> None:
        self.script, self.all_say = script, all_say
        self.cancelled = False
        self.asked: list[tuple[Any, ...]] = []

    def options(self, **how: Any) -> "Handle":
        assert how == {"method_name": "respond", "stream": True}
        return self

    def remote(self, *asked: Any) -> "Handle":
        self.asked.append(asked)
        return self

    async def __aiter__(self) -> AsyncGenerator[Any]:
        for item in self.script:
            if isinstance(item, BaseException):
                raise item
            yield item

    def cancel(self) -> None:
        self.cancelled = True

    def broadcast(self, *asked: Any) -> "Handle":
        self.asked.append(asked)
        return self

    async def results_async(self, *, return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        if self.all_say == ("nothing",):
            await asyncio.Event().wait()
        return list(self.all_say)


HEAD = Head(200, (), "a")


async def answer(handle: Handle) -> list[Any]:
    replicas = import_module("aserve.ray.handle").HandleReplicas(handle)
    return [item async for item in replicas.respond("carried", NO_ASK, ANYWHERE)]


async def test_an_answer_passes_item_by_item_and_is_not_cancelled_at_its_end():
    handle = Handle(HEAD, b"data", Tail())
    assert await answer(handle) == [HEAD, b"data", Tail()]
    assert handle.asked == [("carried", NO_ASK, ANYWHERE)]
    assert not handle.cancelled


async def test_who_leaves_an_answer_cancels_it():
    handle = Handle(HEAD, b"data", b"more")
    replicas = import_module("aserve.ray.handle").HandleReplicas(handle)
    async with aclosing(replicas.respond("carried", NO_ASK, ANYWHERE)) as items:
        await anext(items)
    assert handle.cancelled


@pytest.mark.parametrize("kind", ["RayActorError", "RayError", "RayServeException"])
async def test_a_replica_that_is_gone_is_told_by_its_name(kind: str):
    error = getattr(sys.modules["ray.exceptions"], kind)
    for script, name in (((HEAD, error()), "a"), ((error(),), "")):
        handle = Handle(*script)
        with pytest.raises(ReplicaLost) as lost:
            await answer(handle)
        assert lost.value.replica == name
        assert not handle.cancelled


async def test_what_a_replica_raised_is_raised_here():
    error = TaskError()
    error.__cause__ = UnavailableError("it drains")
    with pytest.raises(UnavailableError, match="it drains"):
        await answer(Handle(error))


async def test_of_all_replicas_those_count_that_answer_in_time(monkeypatch: pytest.MonkeyPatch):
    module = import_module("aserve.ray.handle")
    handle = Handle(all_say=("one", OSError(), "two"))
    assert await module.HandleReplicas(handle).of_all("health", 1) == ["one", "two"]
    assert handle.asked == [("health", 1)]
    monkeypatch.setattr(module, "BROADCAST_S", 0.01)
    with pytest.raises(UnavailableError, match=r"have not answered within 0\.01 s"):
        await module.HandleReplicas(Handle(all_say=("nothing",))).of_all("health")


def test_the_ingress_is_an_application_in_front_of_its_replicas():
    ingress = import_module("aserve.ray.ingress").Ingress(Handle(), GIVEN, 2)
    assert callable(ingress.__serve_build_asgi_app__())

"""Replicas on Ray Serve: several engines behind one address, for `aserve ray` and for Ray's own configuration files.

    client --> Serve's proxy --> ingress: which replica? --> engine replica: create_app over an AsyncEngine
                                    '- dispatch.py                '- engine_replica.py

`app` and `build` are what to import. Ray itself is imported when one of them is called, and not before.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application

    from aserve.cli.flags import ServerOptions
    from aserve.core.config import Options
    from aserve.ray.options import RayOptions


def app(
    options: "Options", replicas: "RayOptions | None" = None, server: "ServerOptions | None" = None
) -> "Application":
    """A Serve application for `serve.run`: the APIs of one model, answered by `replicas.min_replicas` engines and more.

    options: of each engine. replicas: how many there are and what each takes. server: of the APIs; host and port are
    Serve's own business. Raises `ConfigError` for options that are wrong, and where Ray is not installed.
    """
    from aserve.cli.flags import ServerOptions
    from aserve.ray.faults import with_ray
    from aserve.ray.options import RayOptions

    with with_ray():
        from aserve.ray.application import application
    return application(options, replicas or RayOptions(), server or ServerOptions())


def build(args: Mapping[str, Any]) -> "Application":
    """The same from the flags of `aserve ray run`, by name: what a Serve configuration file has under `args`.

    Raises `ConfigError` as `aserve --config` does.
    """
    from aserve.cli.flags import ServerOptions
    from aserve.cli.settings import parse_mapping
    from aserve.core.config import Options
    from aserve.ray.options import RayOptions

    parsed = parse_mapping("ray", dict(args), "args")
    return app(parsed.of(Options), parsed.of(RayOptions), parsed.of(ServerOptions))


__all__ = ["app", "build"]

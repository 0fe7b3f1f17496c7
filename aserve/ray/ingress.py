"""Ingress: the deployment that Serve's proxy talks to. The guard, and behind it what sends requests to replicas."""

from typing import Any

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from aserve.cli.flags import ServerOptions
from aserve.ray.face import face
from aserve.ray.handle import HandleReplicas


class Ingress:
    """handle: of the replicas. given: of the APIs. retries: see `RayOptions`."""

    def __init__(self, handle: DeploymentHandle[Any], given: ServerOptions, retries: int) -> None:
        self._replicas = HandleReplicas(handle)
        self._given = given
        self._retries = retries

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """What Serve's proxy calls."""
        return face(self._replicas, self._given, retries=self._retries)

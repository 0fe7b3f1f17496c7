"""HandleReplicas: the replicas behind a handle of Ray Serve."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from aserve.core.errors import UnavailableError
from aserve.ray.carried import Carried, Head, Item
from aserve.ray.replicas import ReplicaLost, Target
from aserve.routing import Ask

BROADCAST_S: Final = 10.0
"""How long all replicas may take to answer what is asked of all."""


class HandleReplicas:
    """handle: of the deployment whose replicas are `EngineReplica`s."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._responding = handle.options(method_name="respond", stream=True)

    async def respond(self, carried: Carried, ask: Ask, target: Target) -> AsyncGenerator[Item]:
        """See `Replicas`."""
        response: DeploymentResponseGenerator[Item] = self._responding.remote(carried, ask, target)
        replica, is_over = "", False
        try:
            async for item in response:
                if isinstance(item, Head):
                    replica = item.replica
                yield item
            is_over = True
        except RayTaskError as error:  # what the replica raised
            is_over = True
            raise error.as_instanceof_cause() from error
        except (RayActorError, RayError, RayServeException) as error:
            is_over = True
            raise ReplicaLost(replica) from error
        finally:
            if not is_over:
                response.cancel()

    async def of_all(self, method: str, *arguments: Any) -> Sequence[Any]:
        """See `Replicas`."""
        try:
            async with asyncio.timeout(BROADCAST_S):
                found = await self._handle.broadcast(method, *arguments).results_async(return_exceptions=True)
        except TimeoutError:
            raise UnavailableError(f"the replicas have not answered within {BROADCAST_S:g} s") from None
        return [each for each in found if not isinstance(each, BaseException)]

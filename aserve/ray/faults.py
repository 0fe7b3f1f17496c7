"""Ray's own faults as one clear line each, whatever they look like where they happen."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from aserve.core.errors import ConfigError

INSTALL: Final = "Ray Serve is not installed here: pip install 'aserve[ray]'"


@contextmanager
def with_ray() -> Iterator[None]:
    """A block that imports Ray. Raises `ConfigError` where it is not there."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("ray", "fastapi", "uvicorn", "aiohttp", "grpc"):
            raise
        raise ConfigError(f"{INSTALL} (there is no module {error.name})") from None


@contextmanager
def cluster_faults(serving: object = None, app_name: str = "") -> Iterator[None]:
    """A block that starts or asks a cluster. Raises `ConfigError` with one line for what Ray raises in it."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{type(error).__name__}: {error}") from error


def why_not_serving() -> str:
    return ""

"""Ray's own faults as one clear line each, whatever they look like where they happen.

Ray raises many classes, with tracebacks of other processes in their messages. What a person can do something about is
told apart here; of all else the class, and where Ray's own log has the rest.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from aserve.core.errors import ConfigError

INSTALL: Final = "Ray Serve is not installed here: pip install 'aserve[ray]'"
LOGS: Final = "Ray's own log is in /tmp/ray/session_latest/logs"
MAX_DETAIL_CHARS: Final = 300
_OF_RAY: Final = frozenset({"ray", "fastapi", "uvicorn", "aiohttp", "grpc", "opentelemetry", "aiohttp_cors"})
"""Modules that come with ray[serve]."""


@contextmanager
def with_ray() -> Iterator[None]:
    """A block that imports Ray. Raises `ConfigError` where it, or a part of it, is not there."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _OF_RAY:
            raise
        raise ConfigError(f"{INSTALL} (there is no module {error.name})") from None


@contextmanager
def cluster_faults(doing: str) -> Iterator[None]:
    """A block that asks a cluster for something. Raises `ConfigError` with one line for what Ray raises in it.

    doing: what is being done, as in "starting a cluster". Errors of ours go by.
    """
    try:
        yield
    except (ConfigError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise ConfigError(told(doing, error)) from error


def told(doing: str, error: BaseException) -> str:
    """One line for an error that Ray raised."""
    name, text = type(error).__name__, " ".join(str(error).split())
    for has, line in _KNOWN:
        if has in f"{name}: {text}":
            return f"{doing}: {line}"
    return f"{doing}: {name}: {_shortened(text)} ({LOGS})"


_KNOWN: Final = (
    ("Could not find any running Ray instance", "there is no Ray cluster here; start one with: ray start --head"),
    ("Failed to connect to GCS", "no Ray cluster answers at this address; is it the one that ray start printed?"),
    ("Timed out while waiting for GCS", f"the cluster does not answer any more ({LOGS})"),
    ("is not of the form", "--address is a host and a port, such as 10.0.0.1:6379, or auto"),
    ("Failed to bind to address", "another process listens on this port already; take another by --port"),
    ("Version mismatch", "this Python or Ray is of another version than the cluster's: they have to be the same"),
    ("AuthenticationError", "the cluster asks for a token: set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH as it has it"),
    ("Insufficient", "no node of the cluster has what a replica reserves; see --replica-cpus and --replica-gpus"),
    (
        "node timed out during startup",
        f"a node did not start in time, as happens on a busy machine: try again ({LOGS})",
    ),
    ("The current node timed out", f"a node did not start in time, as happens on a busy machine: try again ({LOGS})"),
    ("Failed to start the dashboard", "the dashboard did not start; leave it out by --no-dashboard"),
    ("No space left on device", "the disk is full: Ray needs room in /tmp/ray and /dev/shm"),
)
"""What an error's class and text have in them, and what to say of it."""


def of_deployment(message: str) -> str:
    """One line for a deployment that failed: what the replica raised, which is the last line of its traceback."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    ours = [line for line in lines if ".errors." in line or line.startswith(("ConfigError", "CheckpointError"))]
    raised = next(iter(ours[::-1]), None) or next(iter(lines[::-1]), "no reason was told")
    _, found, rest = raised.partition("Error: ")
    return _shortened(rest if found and ours else raised)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_DETAIL_CHARS else f"{text[:MAX_DETAIL_CHARS]}..."

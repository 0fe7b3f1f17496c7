"""Traces of a server, as OpenTelemetry's own environment variables ask for them; nothing is imported unless they do.

OTEL_TRACES_EXPORTER   otlp, console, none, or another that is installed; otlp where an endpoint is named
OTEL_EXPORTER_OTLP_..., OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_BSP_...,
OTEL_PROPAGATORS, OTEL_SDK_DISABLED      are read by the SDK
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final

from aserve import __version__
from aserve.core.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from starlette.types import ASGIApp

    from aserve.engine import Engine

EXPORTER: Final = "OTEL_TRACES_EXPORTER"
ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS: Final = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
GROUP: Final = "opentelemetry_traces_exporter"
CLOSE_S: Final = 2.0
"""How long the end of the process waits for the last spans to be taken."""


def exporters(environ: Mapping[str, str]) -> list[str]:
    """Names of those that the environment asks for; none where it says nothing of traces."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    default = "otlp" if any(environ.get(name) for name in ENDPOINTS) else "none"
    names = [name.strip() for name in (environ.get(EXPORTER) or default).split(",")]
    return [name for name in names if name and name != "none"]


@contextmanager
def traced(app: "ASGIApp", engine: "Engine", environ: Mapping[str, str]) -> "Iterator[ASGIApp]":
    """The application, traced while the block runs if the environment asks for it; else as it is.

    Raises `ConfigError` for what cannot be done: without the packages, or with an exporter that is not installed.
    """
    names = exporters(environ)
    if not names:
        yield app
        return
    try:
        from aserve.http.tracing import Tracing

        provider = _provider(names, environ)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the environment asks for traces ({' or '.join((EXPORTER, *ENDPOINTS))}), and {error.name} is not "
            "installed: pip install 'aserve[otel]', or set OTEL_SDK_DISABLED=true"
        ) from None
    try:
        yield Tracing(app, engine, provider.get_tracer("aserve", __version__))
    finally:  # who takes no spans holds up nothing: its thread ends with the process
        closing = threading.Thread(target=provider.shutdown, name="aserve traces", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def _provider(names: Sequence[str], environ: Mapping[str, str]) -> "TracerProvider":
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": "aserve", "service.version": __version__})
    provider = TracerProvider(resource=resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
    for name in names:
        make = _exporter(name, environ)
        try:
            provider.add_span_processor(BatchSpanProcessor(make()))
        except ValueError as error:
            raise ConfigError(f"{EXPORTER}: {name} cannot be set up as the environment says: {error}") from None
    return provider


def _exporter(name: str, environ: Mapping[str, str]) -> Any:
    """What makes the exporter of that name."""
    entry = name
    if name == "otlp":
        given = [environ.get(f"OTEL_EXPORTER_OTLP_{which}PROTOCOL") for which in ("TRACES_", "")]
        protocol = next(filter(None, given), "http/protobuf")
        if protocol not in PROTOCOLS:
            raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL must be one of {', '.join(PROTOCOLS)}, got {protocol!r}")
        entry = PROTOCOLS[protocol]
    found = list(entry_points(group=GROUP, name=entry))
    if not found:
        known = ", ".join(sorted(point.name for point in entry_points(group=GROUP))) or "none"
        raise ConfigError(f"{EXPORTER}: the exporter {entry} is not installed; those that are: {known}")
    return found[0].load()

"""OpenTelemetry traces of leases, if OTEL_EXPORTER_OTLP_ENDPOINT names a collector (OTLP over
HTTP; the other variables of OpenTelemetry's specification count, too). Without it nothing is done.

The trace of a lease has the first 16 bytes of the lease's digest as its id, and the root span the
next 8. So each program records its part of the same trace, and no message carries a trace id. The
orchestrator records the root when it gives the lease.

    orchestrator  lease ── submission ── verdict
    prime-node           generate ── upload
    validator                            judge
    trainer                                      train
"""

from __future__ import annotations

import atexit
import logging
import os
from contextvars import ContextVar
from typing import TYPE_CHECKING

from prime_core.errors import UserError
from prime_core.ids import Digest, to_bytes

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
FLUSH_SECONDS = 5.0
"""How long a program that ends waits for a collector."""
_tracer: Tracer | None = None
_root: ContextVar[Digest | None] = ContextVar("root", default=None)
"""The lease whose root span is being made."""


def start(service: str) -> None:
    """Begins to export this program's spans under the name `service`, unless OTEL_SERVICE_NAME
    gives another. Raises UserError if a collector is named and OpenTelemetry is not installed."""
    global _tracer
    if _tracer is not None or not any(map(os.environ.get, ENDPOINTS)):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    except ImportError as error:
        raise UserError(
            f"{ENDPOINTS[0]} names a collector, and OpenTelemetry is not installed",
            hint="pip install 'prime-open[traces]', or unset the variable",
        ) from error

    class Ids(RandomIdGenerator):
        def generate_trace_id(self) -> int:
            root = _root.get()
            return super().generate_trace_id() if root is None else _trace_id(root)

        def generate_span_id(self) -> int:
            root = _root.get()
            return super().generate_span_id() if root is None else _root_id(root)

    # The exporter retries by itself, and warns at each try.
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    named = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", service)})
    provider = TracerProvider(resource=named, id_generator=Ids(), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    atexit.register(provider.force_flush, int(1000 * FLUSH_SECONDS))
    _tracer = provider.get_tracer("prime")


def on() -> bool:
    """Whether spans are exported."""
    return _tracer is not None


def record_lease(lease: Digest, at: float, **attributes: str | int) -> None:
    """Records the root span of a lease that was given at `at` (Unix seconds)."""
    if _tracer is None:
        return
    from opentelemetry.context import Context

    token = _root.set(lease)
    try:
        span = _tracer.start_span(
            "lease", Context(), attributes={"lease": lease, **attributes}, start_time=_ns(at)
        )
    finally:
        _root.reset(token)
    span.end(_ns(at))


def record(lease: Digest, name: str, begin: float, end: float, **attributes: str | int) -> None:
    """Records a span of the lease's trace, from `begin` to `end` (Unix seconds)."""
    if _tracer is None:
        return
    from opentelemetry.trace import (
        NonRecordingSpan,
        SpanContext,
        TraceFlags,
        set_span_in_context,
    )

    root = SpanContext(
        _trace_id(lease),
        _root_id(lease),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )
    span = _tracer.start_span(
        name,
        set_span_in_context(NonRecordingSpan(root)),
        attributes={"lease": lease, **attributes},
        start_time=_ns(begin),
    )
    span.end(_ns(end))


def _trace_id(lease: Digest) -> int:
    return int.from_bytes(to_bytes(lease)[:16], "big")


def _root_id(lease: Digest) -> int:
    return int.from_bytes(to_bytes(lease)[16:24], "big")


def _ns(seconds: float) -> int:
    return int(1e9 * seconds)

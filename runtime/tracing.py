"""OpenTelemetry traces across processes: W3C trace context in, spans over OTLP out; does nothing without the SDK.

The SDK is an optional extra. Without it, or if no traces are requested, a span is an object that does nothing, and the
incoming trace context is forwarded unchanged. Spans contain token counts, nodes and seconds, never prompts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

FLUSH_MS = 1000
"""Time limit for exporting the last spans, in milliseconds."""
_UNNAMED = "unknown_service"
"""Prefix of the SDK's default service name."""

Value = str | int | float | bool


class Span:
    """Span that is not recorded. `trace`: the trace context for calls made within it, as a `traceparent`."""

    def __init__(self, trace: str = "") -> None:
        self.trace = trace

    def set_attributes(self, **attributes: Value) -> None:
        """Add attributes; their names get the prefix `kvferry.`."""

    def end(self, error: str = "") -> None:
        """End the span, with an error if `error` is not empty. Only the first call counts."""


class _Recorded(Span):
    def __init__(self, span: Any, trace: str) -> None:
        super().__init__(trace)
        self._span, self._ended = span, False

    def set_attributes(self, **attributes: Value) -> None:
        for name, value in attributes.items():
            self._span.set_attribute(f"kvferry.{name}", value)

    def end(self, error: str = "") -> None:
        if self._ended:
            return
        self._ended = True
        if error:
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR, error)
        self._span.end()


class Tracer:
    """Tracer of this process; use the instance `TRACER`."""

    def __init__(self) -> None:
        self._otel: Any = None
        self._provider: Any = None

    @property
    def records(self) -> bool:
        """Return whether spans are exported."""
        return self._otel is not None

    def set_up(self, service: str, exporter: Any = None) -> None:
        """Start recording under this service name, unless OTEL_SERVICE_NAME gives another.

        Threads of the SDK send spans through a bounded queue to the target of the OTEL_* variables. Without the SDK
        this logs a warning and records nothing."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            log.warning("tracing is off, OpenTelemetry's SDK is missing (%s): pip install 'kvferry[otel]'", error)
            return
        named = Resource.create()
        if str(named.attributes.get(SERVICE_NAME, _UNNAMED)).startswith(_UNNAMED):
            named = named.merge(Resource({SERVICE_NAME: service}))
        self._provider = TracerProvider(resource=named, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter()))
        self._otel = self._provider.get_tracer("kvferry")

    def close(self) -> None:
        """Send the remaining spans, within a second, and stop recording."""
        if self._provider is not None:
            self._provider.force_flush(FLUSH_MS)
            self._provider.shutdown()
            self._provider = self._otel = None

    def start(self, name: str, trace: str, began_s: float = 0.0, **attributes: Value) -> Span:
        """Start a span that began `began_s` seconds ago, within `trace`, a `traceparent` or empty."""
        if self._otel is None:
            return Span(trace)
        from opentelemetry.trace import SpanKind

        kind = SpanKind.SERVER if name == "request" else SpanKind.INTERNAL
        span = self._otel.start_span(
            name,
            context=_context(trace),
            kind=kind,
            start_time=time.time_ns() - int(began_s * 1e9),
            attributes={f"kvferry.{key}": value for key, value in attributes.items()},
        )
        return _Recorded(span, _traceparent(span))


TRACER = Tracer()


def is_requested(environment: Mapping[str, str]) -> bool:
    """Return whether OpenTelemetry's variables enable traces."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if environment.get("OTEL_TRACES_EXPORTER", "otlp").lower() != "otlp":
        return False
    return any(environment.get(name) for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))


def _context(trace: str) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": trace}, Context())


def _traceparent(span: Any) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

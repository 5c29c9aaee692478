"""An OpenTelemetry collector in ten lines: takes spans over HTTP and keeps them."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kvferry.runtime.tracing import TRACER


class Collector:
    """`spans` by name, in the order of their ends; `services` are the names of those that sent them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.all: list[Any] = []
        self.services: set[str] = set()

    def take(self, data: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            self.services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
            for scope in resource.scope_spans:
                self.all += scope.spans

    def named(self, name: str) -> list[Any]:
        return [span for span in self.all if span.name == name]

    def one(self, name: str) -> Any:
        (span,) = self.named(name)
        return span


def attributes(span: Any) -> dict[str, Any]:
    """By name, without what all have in front."""
    values = {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
    return {key.removeprefix("kvferry."): value for key, value in values.items()}


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """A collector that listens."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            found.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


@contextlib.contextmanager
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """This process's spans go to a collector; all of them are there after the block."""
    with collector() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        TRACER.set_up("kvferry-test")
        try:
            yield found
        finally:
            TRACER.close()

"""Spans of all processes on one clock, and what happened to a request around its longest pause.

Each process appends the begin and the end of its spans to `$CHAOS_DIR/$CHAOS_NAME.spans` as lines of JSON. Times are
monotonic: the faults move the wall clock, and a killed process exports nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvferry.runtime.tracing import TRACER
from tests.chaos.queues import queues

BEFORE_S, AFTER_S = 3.0, 0.3
"""Seconds around a pause that are shown."""


class SpanLog:
    """Span processor of OpenTelemetry's SDK that writes lines."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self._write(span, "begins")

    def on_end(self, span: Any) -> None:
        self._write(span, span.status.description or "ends")

    def shutdown(self) -> None:
        self._file.close()

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True

    def _on_ending(self, span: Any) -> None:
        """Called by the SDK before `on_end`."""

    def _write(self, span: Any, what: str) -> None:
        told = {key.removeprefix("kvferry."): value for key, value in (span.attributes or {}).items()}
        line = {"at": time.monotonic(), "trace": f"{span.context.trace_id:032x}", "span": span.name, "what": what}
        self._file.write(json.dumps(line | {"told": told}) + "\n")


def log_spans(path: Path) -> None:
    """Record this process's spans there; the processes' restarts append."""
    from opentelemetry.sdk.trace import TracerProvider

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SpanLog(path))  # type: ignore[arg-type]
    TRACER._provider, TRACER._otel = provider, provider.get_tracer("kvferry")


def timelines(home: Path, pauses: Sequence[tuple[str, float, float]]) -> list[list[str]]:
    """Of each (trace id, begin, seconds) of a pause: its request's spans and log lines around it, by time, and what
    waited meanwhile in its nodes."""
    wanted = {trace for trace, _, _ in pauses}
    spans: dict[str, list[tuple[float, str]]] = {trace: [] for trace in wanted}
    ids: dict[str, set[str]] = {trace: set() for trace in wanted}
    nodes: dict[str, set[str]] = {trace: set() for trace in wanted}
    for path in sorted(home.glob("*.spans")):
        for line in _lines(path):
            if (trace := line["trace"]) not in wanted:
                continue
            told = " ".join(f"{key}={value}" for key, value in line["told"].items())
            nodes[trace].add(path.stem)
            spans[trace].append((line["at"], f"{path.stem}: {line['span']} {line['what']} {told}"))
            if line["span"] == "request":
                ids[trace].add(str(line["told"].get("id")))
    said = _said(home / "cluster.log", {each for found in ids.values() for each in found})
    found = []
    for trace, began, seconds in pauses:
        waited = queues(home, nodes[trace], began, began + seconds)
        lines = sorted([*spans[trace], *waited, *(line for each in ids[trace] for line in said.get(each, ()))])
        around = [
            f"{at - began:+7.3f}  {told}" for at, told in lines if began - BEFORE_S < at < began + seconds + AFTER_S
        ]
        found.append(around)
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """A killed process may have left half a line."""
    with path.open() as lines:
        for line in lines:
            if line.endswith("}\n"):
                yield json.loads(line)


def _said(path: Path, ids: set[str]) -> dict[str, list[tuple[float, str]]]:
    """Lines of the log by the request that they name."""
    said: dict[str, list[tuple[float, str]]] = {}
    with path.open() as lines:
        for line in lines:
            for name in ids:
                if name in line:
                    at, _, told = line.rstrip().partition(" ")
                    said.setdefault(name, []).append((float(at), told))
    return said

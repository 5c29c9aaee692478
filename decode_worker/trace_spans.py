"""Trace spans of a decode node, one per attempt: from its arrival or grant request to its last token."""

from __future__ import annotations

import threading

from kvferry.engine.events import Failed, Generated
from kvferry.engine.request import Key, key_of
from kvferry.protocol.messages import Job
from kvferry.runtime.tracing import TRACER, Span

MAX_OPEN = 4096
"""Maximum number of open spans; beyond it the oldest span ends as forgotten."""


class TraceSpans:
    """Open spans of attempts; nothing is kept while tracing is off.

    `begin` runs on the link thread or the asyncio loop, `take` on the loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Key, tuple[Span, int]] = {}

    def begin(self, job: Job) -> None:
        """Start a span: an attempt arrived, or a prefill node requested blocks for it."""
        if not TRACER.records:
            return
        span = TRACER.start("decode", job.trace, attempt=job.attempt)
        with self._lock:
            self._open[key_of(job)] = (span, len(job.token_ids) - job.prompt_len)
            oldest = next(iter(self._open)) if len(self._open) > MAX_OPEN else None
        if oldest is not None:
            self._end(oldest, "forgotten")

    def take(self, event: Generated | Failed) -> None:
        """End the span of an attempt with its last event."""
        if not self._open:
            return
        if isinstance(event, Failed):
            self._end(event.key, event.error.code)
        elif event.delta.finish_reason is not None:
            self._end(event.key, "", event.delta.index + len(event.delta.token_ids))

    def _end(self, key: Key, error: str, tokens: int = 0) -> None:
        with self._lock:
            found = self._open.pop(key, None)
        if found is not None:
            span, before = found
            if tokens:
                span.set_attributes(output_tokens=tokens - before)
            span.end(error)

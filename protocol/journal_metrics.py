"""Router metrics of journals, which record requests so that they can be resumed or taken over."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

JOURNAL_FAILURES = ("store", "too_large", "evicted", "name_in_use")
"""Reasons for which a request is not recorded: the store does not answer, or a limit is reached."""
TAKEOVER_KINDS = ("stream", "response", "batch")
"""Kinds of work that routers take over from one another."""


class JournalMetrics:
    """Metrics of recorded requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.open = Gauge("kvferry_journals_open", "Requests of this router being recorded.", registry=registry)
        self.bytes = Counter(
            "kvferry_journal_written_bytes", "Bytes of requests and tokens written to journals.", registry=registry
        )
        self.takeovers = Counter(
            "kvferry_takeovers",
            "Requests that this router continued after their router or client went away, by kind: stream, response, "
            "batch.",
            ["kind"],
            registry=registry,
        )
        self.resumed = Counter(
            "kvferry_answers_resumed",
            "Answers that clients resumed by Last-Event-ID, starting_after or Idempotency-Key.",
            registry=registry,
        )
        self.failures = Counter(
            "kvferry_journal_failures",
            "Requests or writes that were not recorded, by reason: store (no answer), too_large, evicted (the tenant's "
            "share is used up, or the store lost it), name_in_use.",
            ["reason"],
            registry=registry,
        )
        for reason in JOURNAL_FAILURES:
            self.failures.labels(reason)
        for kind in TAKEOVER_KINDS:
            self.takeovers.labels(kind)

"""Relay of engine events to the role's service, metrics, learned rates and block index; also sets load gauges."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvferry.engine.events import Admitted, BlocksChanged, Event, Stepped
from kvferry.protocol.lease import Load
from kvferry.protocol.worker_metrics import WorkerMetrics
from kvferry.worker.rates import RateMeter
from kvferry.worker.service import Service

log = logging.getLogger("kvferry.worker")


class EventRelay:
    """Passes engine events to the link, and on the asyncio loop to routers, metrics, rates and block index.

    call_soon: runs a call on the asyncio loop. note: records stored and removed blocks for the block index."""

    def __init__(
        self,
        service: Service,
        metrics: WorkerMetrics,
        rates: RateMeter,
        note: Callable[[Sequence[bytes], Sequence[bytes]], None],
        call_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        self._service, self._metrics, self._rates, self._note = service, metrics, rates, note
        self._call_soon = call_soon

    def take(self, events: Sequence[Event]) -> None:
        """Relay the events of one engine turn, on the engine thread.

        The loop is scheduled before the link gets the events, so the loop sees a first token before the decode node's
        acknowledgement of its commit. The link does not wait for the loop."""
        self._call_soon(lambda: self._take_on_loop(events))
        try:
            self._service.to_link(events)
        except Exception:
            log.exception("the engine's events could not be passed to the link")

    def _take_on_loop(self, events: Sequence[Event]) -> None:
        """Pass events to the service first, since clients wait for tokens, then to metrics and index."""
        self._service.to_routers(events)
        for event in events:
            if isinstance(event, Stepped):
                self._stepped(event)
            elif isinstance(event, BlocksChanged):
                self._note([*event.stored.values()], [*event.removed.values()])
            elif isinstance(event, Admitted):
                self._admitted(event)

    def _stepped(self, event: Stepped) -> None:
        m = self._metrics
        self._rates.stepped(event)
        m.step.observe(event.seconds)
        for counter, count in (
            (m.step_tokens["prefill"], event.prefill_tokens),
            (m.step_tokens["decode"], event.decode_tokens),
            (m.speculation.drafted, event.drafted),
            (m.speculation.accepted, event.accepted),
            (m.preemptions, event.preempted),
            (m.evictions, event.evicted),
            (m.states.checkpoints["saved"], event.saved),
            (m.states.checkpoints["loaded"], event.loaded),
        ):
            if count:
                counter.inc(count)
        if event.idle is not None:
            m.sessions.paused.set(event.idle.paused)
            for counters, counts in (
                (m.sessions.returns, event.idle.returns),
                (m.sessions.evicted, event.idle.evicted),
            ):
                for label, number in counts.items():
                    counters[label].inc(number)

    def _admitted(self, event: Admitted) -> None:
        m = self._metrics
        m.queue.observe(event.queue_s)
        m.prefix_queries.inc(event.queried)
        m.prefix_hits.inc(event.hit)


def set_load_gauges(metrics: WorkerMetrics, load: Load, leaked_s: float) -> None:
    """Set the gauges of the engine's load and of leaked blocks."""
    metrics.leaked.set(leaked_s)
    metrics.requests_waiting.set(load.waiting_requests)
    metrics.waiting_tokens.set(load.waiting_tokens)
    metrics.requests_running.set(load.running_requests)
    metrics.kv_blocks_total.set(load.total_blocks)
    metrics.grants_open.set(load.open_grants)
    for state, count in block_books(load).items():
        metrics.kv_blocks[state].set(count)


def block_books(load: Load) -> dict[str, int]:
    """Return the blocks by state; the counts add up to the pool's size."""
    return {
        "free": load.free_blocks,
        "active": load.active_blocks,
        "cached": load.cached_blocks,
        "granted": load.granted_blocks,
    }

"""Grants of a decode node: reserves blocks for KV that a prefill node will send, and starts each job once it came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from kvferry.engine.engine import Engine
from kvferry.engine.events import Event, ReservationFailed, Reserved
from kvferry.kv_transfer.ports import TransferKey
from kvferry.protocol.errors import Draining, KvferryError
from kvferry.protocol.link_messages import Commit, GrantPurpose
from kvferry.protocol.messages import Job
from kvferry.worker.grant_dispatch import GrantDispatch
from kvferry.worker.service import NodeParts, ship_outcome


class Grants:
    """Handler of grant requests for jobs.

    Implements `kv_transfer.ports.GrantEvents`. The transfer key owns a reservation. `begun` is called on the link
    thread for every job that asks for a grant. It keeps no state and bypasses the asyncio loop, so a busy HTTP server
    delays no block."""

    def __init__(self, base: NodeParts, arrivals: GrantDispatch, begun: Callable[[Job], None]) -> None:
        self._base, self._arrivals, self._begun = base, arrivals, begun
        self.receiver = arrivals.receiver
        arrivals.take(Job, self)

    # On the engine thread.

    def take(self, events: Sequence[Event]) -> None:
        """Relay the engine's answers to `reserve`, and cancel grants that the engine revokes."""
        for event in events:
            if isinstance(event, Reserved):
                self._base.metrics.grants["granted"].inc()
                self.receiver.granted(cast(TransferKey, event.owner), event.first_block, event.block_ids)
            elif isinstance(event, ReservationFailed):
                self._reservation_failed(cast(TransferKey, event.owner), event)

    def _reserve(self, engine: Engine, key: TransferKey, job: Job) -> None:
        """Reserve blocks, or refuse if the node has changed its role and no longer decodes."""
        if self._base.roles.computing == "decode":
            engine.reserve(key, job)
        else:
            self._base.metrics.grants["refused"].inc()
            self._arrivals.refuse(key, Draining("this is no longer a decode node"))

    def _reservation_failed(self, key: TransferKey, event: ReservationFailed) -> None:
        self._base.metrics.grants["aborted" if event.granted else "refused"].inc()
        if event.granted:
            self.receiver.cancel(key, event.error)
        else:
            self._arrivals.refuse(key, event.error)

    # Called on the link thread.

    def reserve(self, key: TransferKey, purpose: GrantPurpose) -> None:
        assert isinstance(purpose, Job)
        job = purpose
        try:
            self._base.require_ready()
        except Draining as error:
            self._base.metrics.grants["refused"].inc()
            self._arrivals.refuse(key, error)
            return
        self._begun(job)
        self._base.engine.submit(lambda engine: self._reserve(engine, key, job), urgent=job.newcomer)

    def ready(self, key: TransferKey, commit: Commit) -> None:
        first = commit.first
        assert first is not None
        metrics, block_bytes = self._base.metrics, self._base.parts.layout.block_bytes
        metrics.ships["done"].inc()
        metrics.ship_bytes.inc(commit.block_count * block_bytes)
        self._base.engine.submit(lambda engine: engine.start(key, first, commit.covered, commit.sender))

    def failed(self, key: TransferKey, error: KvferryError) -> None:
        self._base.metrics.ships[ship_outcome(error)].inc()
        self._base.engine.submit(lambda engine: engine.withdraw(key, error))

    def quiet(self, key: TransferKey) -> None:
        self._base.engine.submit(lambda engine: engine.transfer_holds.grant_quiet(key))

"""The grants of a decode node: the receiver's questions to the engine, and the engine's answers to the receiver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from engine.events import Event, ReservationFailed, Reserved
from kv_transfer.ports import TransferKey
from kv_transfer.receiver import Receiver
from node.pool_memory import PoolMemory
from node.service import Base
from protocol.errors import Cancelled, Draining, KvferryError
from protocol.link_messages import Commit
from protocol.messages import Job


class Grants:
    """Implements kv_transfer.ports.GrantEvents. A reservation's owner is the transfer's key. `begun` hears on the link
    thread of every job that a grant is asked for. Without state of its own; nothing passes the asyncio loop: a busy
    HTTP server delays no block."""

    def __init__(self, base: Base, begun: Callable[[Job], None]) -> None:
        self._base, self._begun = base, begun
        self.receiver = Receiver(
            base.link,
            PoolMemory(base.parts.kv),
            self,
            epoch=base.epoch,
            fingerprint=base.parts.fingerprint,
            verify=base.verify_checksums,
        )

    # The engine thread.

    def take(self, events: Sequence[Event]) -> None:
        """Answers to `reserve`, and grants that the engine takes back."""
        for event in events:
            if isinstance(event, Reserved):
                self._base.metrics.grants["granted"].inc()
                self.receiver.granted(cast(TransferKey, event.owner), event.first_block, event.block_ids)
            elif isinstance(event, ReservationFailed):
                self._reservation_failed(cast(TransferKey, event.owner), event)

    def _reservation_failed(self, key: TransferKey, event: ReservationFailed) -> None:
        self._base.metrics.grants["aborted" if event.granted else "refused"].inc()
        if event.granted:
            self.receiver.cancel(key, event.error)
        else:
            self.receiver.refused(key, event.error)

    # The link thread.

    def reserve(self, key: TransferKey, job: Job) -> None:
        try:
            self._base.require_ready()
        except Draining as error:
            self._base.metrics.grants["refused"].inc()
            self.receiver.refused(key, error)
            return
        self._begun(job)
        self._base.engine.submit(lambda engine: engine.reserve(key, job))

    def ready(self, key: TransferKey, commit: Commit) -> None:
        metrics, block_bytes = self._base.metrics, self._base.parts.layout.block_bytes
        metrics.ships["done"].inc()
        metrics.ship_bytes.inc(commit.block_count * block_bytes)
        self._base.engine.submit(lambda engine: engine.start(key, commit.first))

    def failed(self, key: TransferKey, error: KvferryError) -> None:
        outcome = "aborted" if isinstance(error, Cancelled) else "failed"
        self._base.metrics.ships[outcome].inc()
        self._base.engine.submit(lambda engine: engine.withdraw(key, error))

    def quiet(self, key: TransferKey) -> None:
        self._base.engine.submit(lambda engine: engine.lent.grant_quiet(key))

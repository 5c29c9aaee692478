"""Ships of a prefill node: passes computed blocks to the sender and grants to the engine.

Nothing here passes the asyncio loop but what routers are told: a busy HTTP server delays no block. The engine thread
brings news, the link thread answers, the loop offers and gives up; a lock keeps the table of offers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvferry.engine.events import Computed, Event, Generated
from kvferry.kv_transfer.ports import ShipStats
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.messages import DecodeTarget, Job
from kvferry.worker.endpoints import Endpoints
from kvferry.worker.service import Base, ship_outcome


@dataclass(slots=True, eq=False)
class Offer:
    """Offer of one job to its decode node, until its ship is quiet.

    Events of an offer that was given up are ignored. Given up: whatever comes is no news any more."""

    job: Job
    given_up: bool = False


class Ships:
    """Implements kv_transfer.ports.ShipEvents.

    `on_done` and `on_failed` are called on the asyncio loop, with the job and the transfer, at most one of them for an
    offer, and none after `give_up`."""

    def __init__(
        self,
        base: Base,
        endpoints: Endpoints,
        on_done: Callable[[Job, int, ShipStats], None],
        on_failed: Callable[[Job, int, KvferryError], None],
    ) -> None:
        self._base, self._tiers, self.sender = base, endpoints.tiers, endpoints.sender
        self._on_done, self._on_failed = on_done, on_failed
        self._lock = threading.Lock()
        self._offers: dict[int, Offer] = {}

    # The asyncio loop.

    def offer(self, target: DecodeTarget, job: Job) -> int:
        """Ask the decode node for a grant; the job is computed once it comes. Returns the transfer."""
        with self._lock:  # the grant may come before `offer` returns
            transfer = self.sender.offer(target, job, self)
            self._offers[transfer] = Offer(job)
        return transfer

    def give_up(self, transfer: int, reason: str) -> None:
        """The attempt ended. The engine must have been told, if it was its end."""
        with self._lock:
            offer = self._offers.get(transfer)
            if offer is not None:
                offer.given_up = True
        self.sender.abort(transfer, reason)

    def busy(self) -> bool:
        """Return whether blocks may still be sent from."""
        return bool(self._offers)

    # The engine thread.

    def take(self, events: Sequence[Event]) -> None:
        """Ship computed blocks; with the first token the ship is complete."""
        for event in events:
            if isinstance(event, Computed):
                self.sender.ship(event.transfer, event.blocks)
            elif isinstance(event, Generated) and event.handover is not None and self._open(event.handover):
                self.sender.commit(event.handover, replace(event.delta, prompt_logprobs=None))

    # The link thread.

    def granted(self, transfer: int, first_block: int) -> None:
        """Decode reserved its blocks: now the prompt may be computed, or fetched.

        An attempt that ends meanwhile is known to the engine as cancelled."""
        offer = self._open(transfer)
        if offer is not None:
            job = offer.job
            self._base.engine.submit(
                lambda engine: self._tiers.add(
                    engine, job, transfer=transfer, first_block=first_block, prefill_only=True
                ),
                urgent=job.newcomer,
            )

    def sent(self, transfer: int) -> None:
        """The prompt's next blocks go as they are computed."""

    def done(self, transfer: int, stats: ShipStats) -> None:
        """Decode has everything and owns the request now."""
        self._base.call_soon(lambda: self._base.shipped(stats))
        offer = self._open(transfer)
        if offer is not None:
            job = offer.job
            self._base.call_soon(lambda: self._on_done(job, transfer, stats))

    def failed(self, transfer: int, error: KvferryError) -> None:
        """The ship broke, or was given up.

        The engine lets go of the request before it hears that the ship is quiet: it would take new holds for the ship
        otherwise."""
        offer = self._open(transfer)
        self._base.metrics.ships[ship_outcome(error) if offer is not None else "aborted"].inc()
        if offer is not None:
            job = offer.job
            self._base.engine.cancel(job.request_id, job.attempt)
            self._base.call_soon(lambda: self._on_failed(job, transfer, error))

    def quiet(self, transfer: int) -> None:
        """No send touches the ship's blocks any more."""
        self._base.engine.submit(lambda engine: engine.transfer_holds.ship_quiet(transfer))
        with self._lock:
            self._offers.pop(transfer, None)

    def _open(self, transfer: int) -> Offer | None:
        with self._lock:
            offer = self._offers.get(transfer)
        return None if offer is None or offer.given_up else offer

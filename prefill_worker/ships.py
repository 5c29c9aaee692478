"""Ships (KV block transfers) of a prefill node's attempts: relays computed blocks to the sender, grants to the engine.

Only reports to routers run on the asyncio loop, so a busy HTTP server delays no block. Engine events come on the engine
thread, answers on the link thread; the loop offers and gives up ships. A lock protects the table of offers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvferry.engine.events import Computed, Event, Generated
from kvferry.kv_transfer.ports import ShipStats
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.media import without_data
from kvferry.protocol.messages import DecodeTarget, Job
from kvferry.worker.endpoints import Endpoints
from kvferry.worker.service import NodeParts, ship_outcome


@dataclass(slots=True, eq=False)
class Offer:
    """Offer of one job to its decode node, until no send of its ship touches blocks any more.

    given_up: later events of the ship are ignored."""

    job: Job
    given_up: bool = False


class Ships:
    """Ships of a prefill node's attempts, from offer to quiet.

    Implements `kv_transfer.ports.ShipEvents`. `on_done` and `on_failed` are called on the asyncio loop with the job and
    the transfer. At most one of them is called per offer, and none after `abandon`."""

    def __init__(
        self,
        base: NodeParts,
        endpoints: Endpoints,
        on_done: Callable[[Job, int, ShipStats], None],
        on_failed: Callable[[Job, int, KvferryError], None],
    ) -> None:
        self._base, self._tiers, self.sender = base, endpoints.tiers, endpoints.sender
        self._on_done, self._on_failed = on_done, on_failed
        self._lock = threading.Lock()
        self._offers: dict[int, Offer] = {}

    # On the asyncio loop.

    def offer(self, target: DecodeTarget, job: Job) -> int:
        """Request a grant of the decode node and return the transfer; the job is computed once granted."""
        purpose = replace(job, media=without_data(job.media))
        with self._lock:  # the grant may come before `offer` returns
            transfer = self.sender.offer(target, purpose, self)
            self._offers[transfer] = Offer(job)
        return transfer

    def abandon(self, transfer: int, reason: str) -> None:
        """Abort the ship of an attempt that ended.

        If the attempt was cancelled or failed, the caller must cancel it in the engine first."""
        with self._lock:
            offer = self._offers.get(transfer)
            if offer is not None:
                offer.given_up = True
        self.sender.abort(transfer, reason)

    def busy(self) -> bool:
        """Return whether ships may still read blocks."""
        return bool(self._offers)

    # On the engine thread.

    def take(self, events: Sequence[Event]) -> None:
        """Send computed blocks; the first token completes the ship."""
        for event in events:
            if isinstance(event, Computed):
                self.sender.ship(event.transfer, event.blocks)
            elif isinstance(event, Generated) and event.handover is not None and self._open(event.handover):
                self.sender.commit(event.handover, replace(event.delta, prompt_logprobs=None))

    # Called on the link thread.

    def granted(self, transfer: int, first_block: int) -> None:
        """Submit the job to the engine, since the decode node has reserved its blocks.

        If the attempt has ended meanwhile, the engine has recorded it as cancelled."""
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
        """Do nothing: the next blocks are sent when they are computed."""

    def done(self, transfer: int, stats: ShipStats) -> None:
        """Report success: the decode node has all blocks and now owns the request."""
        self._base.call_soon(lambda: self._base.shipped(stats))
        offer = self._open(transfer)
        if offer is not None:
            job = offer.job
            self._base.call_soon(lambda: self._on_done(job, transfer, stats))

    def failed(self, transfer: int, error: KvferryError) -> None:
        """Cancel the attempt and report the error.

        The engine drops the request before `quiet`; otherwise it would take new holds for the ship."""
        offer = self._open(transfer)
        self._base.metrics.ships[ship_outcome(error) if offer is not None else "aborted"].inc()
        if offer is not None:
            job = offer.job
            self._base.engine.cancel(job.request_id, job.attempt)
            self._base.call_soon(lambda: self._on_failed(job, transfer, error))

    def quiet(self, transfer: int) -> None:
        """Release the ship's blocks: no send touches them any more."""
        self._base.engine.submit(lambda engine: engine.transfer_holds.ship_quiet(transfer))
        with self._lock:
            self._offers.pop(transfer, None)

    def _open(self, transfer: int) -> Offer | None:
        with self._lock:
            offer = self._offers.get(transfer)
        return None if offer is None or offer.given_up else offer

"""Mistakes that the protocol might have, each a small change of the real code: the simulation must find every one."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from kvferry.decode_worker.grants import Grants
from kvferry.engine.block_interfaces import QUIESCE, SHIP
from kvferry.engine.engine import Engine
from kvferry.engine.ledger import Ledger
from kvferry.engine.scheduler import Scheduler
from kvferry.engine.transfer_holds import TransferHolds
from kvferry.kv_transfer import receiver as receiver_module
from kvferry.kv_transfer.dock import Dock
from kvferry.kv_transfer.incoming import Incoming
from kvferry.kv_transfer.outgoing import Outgoing
from kvferry.kv_transfer.receiver import Receiver
from kvferry.kv_transfer.receiver_grant import OpenGrant
from kvferry.kv_transfer.sender_ship import Ship
from kvferry.prefill_worker.ships import Ships
from kvferry.router.nodes.client import NodeClient
from kvferry.router.nodes.node_entry import Reservation
from tests.virtual.mistake import Mutant, mutant


@mutant("written.*, but not held")
def grant_quiet_too_early() -> Mutant:
    """A grant that failed is quiet while receives may still write."""
    return patch.object(OpenGrant, "in_flight", property(lambda grant: 0 if not grant.live else grant.blocks.in_flight))


@mutant("is sent, but not held")
def ship_quiet_too_early() -> Mutant:
    """A ship is quiet while its blocks are still being sent."""
    return patch.object(Ship, "in_flight", property(lambda ship: 0))


@mutant("written late, but not held")
def closed_before_it_is_quiet() -> Mutant:
    """A connection is taken for closed as soon as it is being closed."""

    def drop(dock: Dock, peer: Any, error: Exception) -> None:
        if peer not in dock._closing:
            real(dock, peer, error)
            dock._closed(peer)

    real = Dock.drop
    return patch.object(Dock, "drop", drop)


@mutant("written.*, but not held")
def hold_dropped_with_the_grant() -> Mutant:
    """A withdrawn grant's blocks are let go at once."""

    def withdraw(transfer_holds: TransferHolds, request: Any) -> None:
        real(transfer_holds, request)
        transfer_holds.grant_quiet(request.grant)

    real = TransferHolds.withdraw
    return patch.object(TransferHolds, "withdraw", withdraw)


@mutant("is sent, but not held")
def hold_dropped_with_the_request() -> Mutant:
    """A ship's blocks are let go when its request ends."""

    def remove(scheduler: Scheduler, request: Any) -> None:
        real(scheduler, request)
        if request.transfer is not None and request.held_for_transfer:
            scheduler.pool.release(("ship", request.transfer), SHIP, request.block_ids)
            request.block_ids = []

    real = Scheduler.remove
    return patch.object(Scheduler, "remove", remove)


@mutant("instead of")
def landed_before_the_last_block() -> Mutant:
    """A grant is ready when its commit comes, whatever has landed."""

    def committed(receiver: Receiver, grant: OpenGrant, commit: Any) -> None:
        if grant.blocks is not None and grant.live:
            grant.blocks.in_flight = 0
        real(receiver, grant, commit)

    real = Receiver._committed
    return patch.object(Receiver, "_committed", committed)


@mutant("not idle .* grants|ships failed where nothing was wrong")
def committed_before_the_last_block() -> Mutant:
    """The sender forgets blocks that wait for the window."""

    def checksums(blocks: Outgoing) -> tuple[int, ...] | None:
        waiting = len(blocks._waiting)
        blocks._waiting.clear()
        return real(blocks) if not waiting else ()

    real = Outgoing.checksums
    return patch.object(Outgoing, "checksums", checksums)


@mutant("by another epoch")
def epoch_not_checked() -> Mutant:
    """A process grants what its predecessor at the address was asked for."""
    return patch.object(receiver_module, "mismatch", lambda request, fingerprint, epoch: None)


@mutant("held blocks")
def cancel_forgets_blocks() -> Mutant:
    """A request that ends while it waits for its blocks keeps them."""

    def withdraw(transfer_holds: TransferHolds, request: Any) -> None:
        transfer_holds._pool.holds.move(request.grant, "grant", QUIESCE)

    return patch.object(TransferHolds, "withdraw", withdraw)


@mutant("is computed, but was cancelled")
def cancel_forgets_late_arrivals() -> Mutant:
    """An attempt that arrives after its cancel is served."""
    return patch("kvferry.engine.admission.Admission.close", lambda door, request_id, attempt: None)


@mutant("is sent, but not held")
def ship_quiet_before_its_request() -> Mutant:
    """The engine is not told of a ship that failed."""

    def failed(ships: Ships, transfer: int, error: Any) -> None:
        offer = ships._open(transfer)
        if offer is not None:
            ships._base.call_soon(lambda: ships._on_failed(offer.job, transfer, error))

    return patch.object(Ships, "failed", failed)


@mutant("not idle .* grants")
def receives_are_never_filled() -> Mutant:
    """A ship that fails leaves the receives open that it will not fill, and nobody closes their connection."""
    stack = contextlib.ExitStack()
    stack.enter_context(patch.object(Outgoing, "fill", Outgoing.stop))
    stack.enter_context(patch.object(Receiver, "overdue", lambda receiver, grant: None))
    return stack


@mutant("instead of")
def checksums_not_compared() -> Mutant:
    """What came is taken for what was sent."""
    return patch.object(Incoming, "wrong", lambda blocks, theirs: None)


@mutant("instead of")
def first_token_of_another_attempt() -> Mutant:
    """A hand-over says that the token is the second."""

    def start(engine: Engine, grant: Any, first: Any, *more: Any) -> None:
        real(engine, grant, replace(first, token_ids=((first.token_ids[0] + 1) % 200, *first.token_ids[1:])), *more)

    real = Engine.start
    return patch.object(Engine, "start", start)


@mutant("booked")
def booking_kept() -> Mutant:
    """A dispatch's bookings outlive it."""
    return patch.object(Reservation, "release", lambda booking: None)


@mutant("not idle .* requests")
def nobody_is_cancelled() -> Mutant:
    """Dispatches that end early tell no node."""

    async def cancel(client: NodeClient, node: Any, request: Any) -> None:
        return None

    return patch.object(NodeClient, "cancel", cancel)


@mutant("not idle .* grants")
def deadline_of_a_grant_ignored() -> Mutant:
    """Nobody ends a grant whose request came too late."""
    return patch.object(Receiver, "overdue", lambda receiver, grant: None)


@mutant("but not held")
def evicted_while_shared() -> Mutant:
    """A block that two hold is free when the first lets go."""

    def release(ledger: Ledger, owner: Any, reason: str, block_ids: Any = None) -> list[int]:
        owned = list(ledger._pages.get(reason, {}).get(owner, {})) if block_ids is None else list(block_ids)
        shared = [block_id for block_id in owned if ledger._counts[block_id] > 1]
        for block_id in shared:
            ledger._counts[block_id] = 1
        return real(ledger, owner, reason, owned)

    real = Ledger.release
    return patch.object(Ledger, "release", release)


@mutant("instead of")
def withdrawn_grant_runs() -> Mutant:
    """A grant that failed is handed to the engine as ready."""

    def failed(grants: Grants, key: Any, error: Any) -> None:
        grants._base.engine.submit(lambda engine: _run_anyway(engine, key))

    return patch.object(Grants, "failed", failed)


def _run_anyway(engine: Engine, key: Any) -> None:
    request = engine.request_table.by_grant(key)
    if request is not None and request.block_ids:
        engine.scheduler.land(request)
        request.computed_len = len(request.token_ids) - 1

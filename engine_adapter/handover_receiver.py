"""Receiving side of handovers: a decode node takes each reference once, while its blocks surely exist.

A decode node cannot see when a prefill ended on another machine, and a message may lie in a socket while a process is
suspended. So the prefill node asks for a ticket first. What passes here since then, plus what the prefill node measured
on its side, is at least the reference's age."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.engine_adapter.transfer import Transfer
from kvferry.protocol.errors import Fenced, InvalidRequest, TransferFailed
from kvferry.protocol.handover_messages import IN_ROOM, Handover, HandoverOffer, HandoverTicket, RoomFirstToken
from kvferry.protocol.messages import Job
from kvferry.protocol.process_names import NodeName
from kvferry.protocol.work import Generate

log = logging.getLogger("kvferry.adapter")

MAX_TICKETS, MAX_REFERENCES = 16_384, 65_536
"""Maximum number of tickets that wait for their handover, and of used references that are remembered."""
FRESH = 0.5
"""Share of its lease up to which a reference is accepted: the engine must fetch the blocks before the lease ends."""


@dataclass(frozen=True, slots=True)
class _Ticket:
    """A ticket's offer, and when it was given."""

    offer: HandoverOffer
    given: float


class Handovers:
    """Handovers to one decode node, on the asyncio loop.

    name     of this node
    start    begins an attempt
    exact    returns whether two engines of this kind always draw the same tokens for a job
    refused  called for each handover that is refused"""

    def __init__(
        self,
        name: NodeName,
        start: Callable[[Job, Transfer], None],
        exact: Callable[[Job], bool],
        refused: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._start, self._exact, self._refused, self._clock = name, start, exact, refused, clock
        self._tickets: OrderedDict[str, _Ticket] = OrderedDict()
        self._used: OrderedDict[bytes, None] = OrderedDict()

    def offer(self, offer: HandoverOffer) -> HandoverTicket:
        """Give a ticket. Raises Fenced if the offer is for another epoch of this node."""
        self._check_epoch(offer.decode_epoch)
        ticket = secrets.token_hex(16)
        self._tickets[ticket] = _Ticket(offer, self._clock())
        while len(self._tickets) > MAX_TICKETS:
            self._tickets.popitem(last=False)
        return HandoverTicket(ticket)

    async def take(self, handover: Handover) -> RoomFirstToken | None:
        """Begin the attempt; return once the engine has its blocks. Raises the error that ends the attempt before.

        For a room it returns the first token, which came with the blocks.
        Raises Fenced, TransferFailed or InvalidRequest for a handover that must not reach the engine."""
        try:
            transfer = self._accepted(handover)
        except (Fenced, TransferFailed, InvalidRequest) as error:
            log.warning("refused the handover of %s from %s: %s", handover.job.request_id, handover.sender[0], error)
            self._refused()
            raise
        self._start(handover.job, transfer)
        await asyncio.shield(transfer.landed)
        return RoomFirstToken(transfer.tokens[0]) if handover.first_token == IN_ROOM else None

    def _accepted(self, handover: Handover) -> Transfer:
        job, ticket, now = handover.job, self._tickets.pop(handover.ticket, None), self._clock()
        self._check_epoch(handover.decode_epoch)
        meant = HandoverOffer(job.request_id, job.attempt, handover.sender, handover.decode_epoch)
        if ticket is None or ticket.offer != meant:
            raise TransferFailed("the ticket is unknown, already used, or of another attempt")
        known = job.token_ids[handover.length :]
        if not isinstance(job.work, Generate) or not job.prompt_len <= handover.length <= len(job.token_ids):
            raise InvalidRequest("the number of tokens in the blocks is not that of the job", param="length")
        first = None if handover.first_token == IN_ROOM else handover.first_token
        if known and first is not None and known[0] != first:
            raise TransferFailed("the first token differs from the one that was delivered")
        age_s = handover.age_s + (now - ticket.given)
        if not 0 <= age_s < FRESH * handover.lease_s:
            raise TransferFailed(f"the reference is {age_s:.3g} s old, with a lease of {handover.lease_s:.3g} s")
        digest = hashlib.sha256(handover.reference.encode()).digest()
        if not handover.reference or digest in self._used:
            raise TransferFailed("the reference was already used")
        self._used[digest] = None
        while len(self._used) > MAX_REFERENCES:
            self._used.popitem(last=False)
        ends_at = now - age_s + handover.lease_s
        return Transfer(handover.sender, handover.reference, handover.length, first, ends_at,
                        self._exact(job), self._clock)  # fmt: skip

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._name[1]:
            raise Fenced(f"{self._name[0]} has epoch {self._name[1]}, not {epoch}")

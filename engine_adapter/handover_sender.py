"""Sending side of handovers: a prefill node's adapter hands computed prompts to adapters of decode nodes."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.engine_adapter.handover_client import HandoverClient
from kvferry.engine_adapter.learned_rates import LearnedRates
from kvferry.protocol.errors import Cancelled, GrantRefused, Incompatible, KvferryError, NodeLost, TransferFailed
from kvferry.protocol.handover_messages import IN_ROOM, Handover, HandoverOffer
from kvferry.protocol.layout import blocks_for
from kvferry.protocol.messages import DecodeTarget, Job, ShipDone
from kvferry.protocol.process_names import NodeName


class PinnedBlocks:
    """Prompts whose blocks an engine keeps until they are fetched, or for `lease_s` seconds.

    Nothing can release them earlier: an attempt cancelled after its prefill keeps its blocks until the lease ends."""

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s, self._clock, self._numbers = lease_s, clock, itertools.count()
        self._held: OrderedDict[int, tuple[float, int]] = OrderedDict()

    def pin(self, blocks: int) -> int:
        """Record blocks that are kept from now on; return a number by which to release them."""
        number = next(self._numbers)
        self._held[number] = (self._clock() + self._lease_s, blocks)
        return number

    def fetched(self, number: int) -> None:
        """Note that blocks were fetched."""
        self._held.pop(number, None)

    @property
    def prompts(self) -> int:
        """Return the number of prompts that are kept."""
        self._expire()
        return len(self._held)

    @property
    def blocks(self) -> int:
        """Return the number of blocks that are kept."""
        self._expire()
        return sum(blocks for _, blocks in self._held.values())

    def _expire(self) -> None:
        now = self._clock()
        while self._held and next(iter(self._held.values()))[0] <= now:
            self._held.popitem(last=False)


ROOM_S = 300.0
"""Maximum duration of a room, in seconds: the two engines abandon it themselves after that."""


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """Tokens and bytes of a block (0: unknown), and seconds for which the engine keeps a prompt's blocks."""

    size: int
    bytes: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class Ticket:
    """A decode node's ticket, and when it came, in monotonic seconds."""

    ticket: str
    received: float


@dataclass(frozen=True, slots=True)
class KeptPrompt:
    """A prompt whose blocks the engine keeps.

    length       in tokens
    first_token  drawn after it
    reference    see EngineCall; empty: the engine gave none
    ended        when the engine's answer came, in monotonic seconds
    suspended_s  how long this process was suspended during the call: the answer may have come that much earlier
    number       by which the blocks are pinned"""

    length: int
    first_token: int
    reference: str
    ended: float
    suspended_s: float
    number: int


class HandoverSender:
    """Handovers from one prefill node. pinned: blocks that were not fetched yet. rates: learn from the transfers."""

    def __init__(self, client: HandoverClient, name: NodeName, blocks: BlockFacts, rates: LearnedRates) -> None:
        self._client, self._name, self._blocks, self.rates = client, name, blocks, rates
        self.pinned = PinnedBlocks(blocks.lease_s)

    async def offer(self, job: Job, target: DecodeTarget) -> Ticket:
        """Return a ticket of the decode node. Raises an error from which routers know which node failed."""
        try:
            ticket = await self._client.offer(
                target, HandoverOffer(job.request_id, job.attempt, self._name, target.epoch)
            )
            return Ticket(ticket, time.monotonic())
        except KvferryError as error:
            raise of_decode(error) from error

    def keep(self, length: int, first_token: int, reference: str, suspended_s: float) -> KeptPrompt:
        """Note that the engine keeps a prompt's blocks from now on."""
        number = self.pinned.pin(blocks_for(length, self._blocks.size)) if reference else -1
        return KeptPrompt(length, first_token, reference, time.monotonic(), suspended_s, number)

    async def send(self, job: Job, target: DecodeTarget, prompt: KeptPrompt, ticket: Ticket) -> ShipDone:
        """Hand a prompt over; return once the decode engine has its blocks. Raises as `offer`."""
        if not prompt.reference:
            raise TransferFailed("the engine gave no reference to the prompt's blocks")
        age_s, began = ticket.received - prompt.ended + prompt.suspended_s, time.monotonic()
        handover = Handover(job, ticket.ticket, self._name, target.epoch, prompt.length, prompt.first_token,
                            prompt.reference, age_s, self._blocks.lease_s)  # fmt: skip
        left_s = self._blocks.lease_s - prompt.suspended_s - (began - prompt.ended)
        try:
            await self._client.hand_over(target, handover, max(0.0, left_s))
        except KvferryError as error:
            raise of_decode(error) from error
        seconds, blocks = time.monotonic() - began, blocks_for(prompt.length, self._blocks.size)
        self.pinned.fetched(prompt.number)
        size = blocks * self._blocks.bytes
        self.rates.shipped(size, seconds)
        return ShipDone(job.request_id, job.attempt, blocks, size, seconds, seconds)

    async def hand_over_room(
        self, job: Job, target: DecodeTarget, length: int, reference: str, ticket: Ticket
    ) -> tuple[ShipDone, int]:
        """Hand over a room while the prompt is computed; return once the decode engine has the blocks.

        Returns the account and the first token that came with them. Raises as `offer`."""
        began, blocks = time.monotonic(), blocks_for(length, self._blocks.size)
        handover = Handover(job, ticket.ticket, self._name, target.epoch, length, IN_ROOM, reference, 0.0, ROOM_S)
        number = self.pinned.pin(blocks)
        try:
            left = await self._client.hand_over(target, handover, ROOM_S)
        except KvferryError as error:
            raise of_decode(error) from error
        finally:
            self.pinned.fetched(number)
        if left is None:
            raise TransferFailed(f"{target.node_id} did not return the first token of a room")
        seconds, size = time.monotonic() - began, blocks * self._blocks.bytes
        return ShipDone(job.request_id, job.attempt, blocks, size, seconds, seconds), left.first_token


def of_decode(error: KvferryError) -> KvferryError:
    """Convert an error of a decode node into one from which routers know which node failed."""
    if isinstance(error, NodeLost | TransferFailed | Incompatible | Cancelled):
        return error
    return GrantRefused(error.message, retry_after=error.retry_after)

"""RecordedDispatch: replays recorded outputs, then follows the router that computes the rest, or computes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from kvferry.cluster_state.journals import Journal, Journals
from kvferry.protocol.errors import Cancelled, InvalidRequest, Retryable
from kvferry.router.dispatch.interface import Delivered, Dispatch, Fork, Output, RequestSpec, Route
from kvferry.router.journal.ownership import owning
from kvferry.router.journal.recording import Recording

FOLLOW_S = 0.2
"""Seconds between reads of the journal of a request that another router computes."""
REWRITE_S = 2.0
"""Seconds within which the owner of a journal writes it again after the store has lost its data."""


class FollowedJournal:
    """A journal as one router reads it; `recording` grows while another router writes.

    is_own      this router owns it, and computes the missing outputs
    may_claim   this router may claim it as soon as its owner is dead or released it
    claimed     called when this router owns it; raises KvferryError if it cannot continue
    """

    def __init__(
        self, journals: Journals, tenant: str, name: str, owner: str, ttl_s: float, recording: Recording, *,
        may_claim: bool,
    ) -> None:  # fmt: skip
        self.recording, self.is_own, self._may_claim = recording, False, may_claim
        self.claimed: Callable[[], Awaitable[None]] | None = None
        self._journals, self._key, self._owner, self._ttl_s = journals, (tenant, name), owner, ttl_s
        self._lock = asyncio.Lock()

    async def advance(self, seen: int) -> None:
        """Wait until more than `seen` entries are known, the answer has ended, or this router must compute the rest.

        Raises Retryable if the journal is no longer kept: its request failed before its first token."""
        async with self._lock:
            while self.recording.entries == seen and not self.recording.has_ended and not self.is_own:
                await asyncio.sleep(FOLLOW_S)
                if not (await self.read()).is_owned and self._may_claim and not self.recording.has_ended:
                    await self.claim()

    async def read(self) -> Journal:
        """Read the entries written since the last read. Raises Retryable if the journal is no longer kept."""
        known = self.recording.data[-1:]
        journal = await self._found(self.recording.entries - len(known))
        if journal.entries[: len(known)] == known:
            self.recording.add(journal.entries[len(known) :])
        else:  # its owner writes it again, since the store has lost its data: the entries have other numbers
            journal = await self._found(0)
            self.recording.renew(journal.entries)
        return journal

    async def _found(self, since: int) -> Journal:
        """Return the journal; one that had entries is waited for, since its owner may write it again."""
        deadline = time.monotonic() + (REWRITE_S if self.recording.entries else 0.0)
        while (journal := await self._journals.read(*self._key, since)) is None:
            if time.monotonic() >= deadline:
                raise Retryable("the request that computed this answer has failed; send it again")
            await asyncio.sleep(FOLLOW_S)
        return journal

    async def claim(self, *, by_force: bool = False) -> bool:
        """Claim the journal unless a live router owns it, or in any case; return whether this router owns it now."""
        release = partial(self._journals.release, *self._key, self._owner, ttl_s=self._ttl_s)
        if await owning(self._claim(by_force), release):
            self.is_own = True
            if self.claimed is not None and not self.recording.has_ended:
                await self.claimed()
        return self.is_own

    async def _claim(self, by_force: bool) -> bool:
        if not await self._journals.claim(*self._key, self._owner, ttl_s=self._ttl_s, by_force=by_force):
            return False
        await self.read()
        return True


class RecordedDispatch:
    """Dispatch of one choice of a recorded request. Implements router.dispatch.interface.Dispatch.

    compute: starts the remaining computation; None: Cancelled is raised after the recorded outputs."""

    def __init__(
        self,
        spec: RequestSpec,
        choice: int,
        journal: FollowedJournal,
        compute: Callable[[RequestSpec], Dispatch] | None,
    ) -> None:
        self._spec, self._choice, self._journal, self._compute = spec, choice, journal, compute
        self._listener: Callable[[Output], None] | None = None
        self._inner: Dispatch | None = None
        self._over = False
        self.route: Route | None = journal.recording.choices[choice].route

    @property
    def fork(self) -> Fork | None:
        """Return the data that other requests need to fork from this one; None if nothing runs here."""
        return self._inner.fork if self._inner is not None else None

    def __aiter__(self) -> AsyncGenerator[Output]:
        return self._outputs()

    def listen(self, listener: Callable[[Output], None] | None) -> None:
        """Send the outputs that are computed here directly to `listener`; see Dispatch.listen."""
        self._listener = listener
        if self._inner is not None:
            self._inner.listen(listener)

    def calls_tools(self, names: Collection[str]) -> None:
        if self._inner is not None:
            self._inner.calls_tools(names)

    async def cancel(self, *, complete: bool = False) -> None:
        self._over = True
        if self._inner is not None:
            await self._inner.cancel(complete=complete)

    async def _outputs(self) -> AsyncGenerator[Output]:
        journal = self._journal
        recorded, position = journal.recording.choices[self._choice], 0
        while True:
            self.route = recorded.route
            while position < len(recorded.outputs):
                yield recorded.outputs[position]
                position += 1
                if recorded.outputs[position - 1].finish_reason is not None:
                    return
            if journal.is_own or journal.recording.has_ended:
                break
            await journal.advance(journal.recording.entries)
        if journal.recording.has_ended and not journal.is_own:
            raise InvalidRequest("the answer ended before it was complete: it failed or was cancelled")
        if self._over or self._compute is None:
            raise Cancelled("the request was cancelled")
        delivered = Delivered(recorded.token_ids, recorded.route, recorded.fingerprint)
        self._inner = self._compute(replace(self._spec, delivered=delivered))
        self._inner.listen(self._listener)
        async with aclosing(aiter(self._inner)) as outputs:
            async for output in outputs:
                self.route = self._inner.route
                yield output
        self.route = self._inner.route

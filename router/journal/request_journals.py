"""RequestJournals: opens journals for new requests, and finds those that clients or routers resume."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial

from kvferry.cluster_state.journals import Journals
from kvferry.cluster_state.memory_journals import MemoryJournals
from kvferry.protocol.errors import InvalidRequest, NotFound, RegistryUnavailable
from kvferry.protocol.journal_metrics import JournalMetrics
from kvferry.protocol.settings import RouterSettings
from kvferry.protocol.wire import WireError
from kvferry.router.journal.errors import KeyReused
from kvferry.router.journal.event_ids import HEADER, parsed_id
from kvferry.router.journal.journaled_request import JournaledRequest
from kvferry.router.journal.open_journal import OpenJournal
from kvferry.router.journal.ownership import owning, release_soon
from kvferry.router.journal.recorded_dispatch import FollowedJournal
from kvferry.router.journal.recording import JournalHead, Recording
from kvferry.router.journal.writer import JournalWriter
from kvferry.router.request_context import RequestContext

KEY = "Idempotency-Key"
MAX_KEY = 255
"""Longest idempotency key, in characters."""
LEAST_TIME_S = 1.0
"""Shortest time that a resumed request is given to finish, in seconds."""
DELETED_LIFE_S = 1.0
"""Seconds until the journal of a deleted answer expires; its writer checks it four times a second."""


class RequestJournals:
    """Journals of one router process, `owner`.

    shared    store for all routers; None: requests are recorded in this process alone
    window_s  seconds for which a journal is kept after the last write; 0: nothing is recorded
    """

    def __init__(self, settings: RouterSettings, owner: str, metrics: JournalMetrics, shared: Journals | None) -> None:
        self.window_s, self.metrics, self._owner = settings.resume_window, metrics, owner
        max_bytes, share = settings.resume_record_kib * 2**10, settings.resume_store_mib * 2**20
        own = MemoryJournals(share=share)
        self._local = JournalStore(own, JournalWriter(own, owner, metrics, max_bytes=max_bytes))
        self._shared = self._local
        if shared is not None:
            self._shared = JournalStore(shared, JournalWriter(shared, owner, metrics, max_bytes=max_bytes))
        self._max_bytes = max_bytes

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write the journals until the end of the block."""
        async with self._local.writer.running(), contextlib.AsyncExitStack() as stack:
            if self._shared is not self._local:
                await stack.enter_async_context(self._shared.writer.running())
            yield

    async def begin(
        self, call: RequestContext, path: str, body: bytes, name: str, *, stored: bool, watched: bool = False
    ) -> JournaledRequest | None:
        """Return the request's journal, a new one or that of the request it repeats; None if it has none.

        name: of a new journal. stored: if false, it is kept in this process. watched: other routers continue it without
        a client's request. Raises InvalidRequest, KeyReused, NotFound, and RegistryUnavailable if a stream cannot
        be resumed now."""
        resume = call.resume
        if not self.window_s:
            return None
        _check_key(resume.key)
        if resume.after:
            known, place = parsed_id(resume.after)
            request = await self.find(call, known, path)
            if not request.head.is_of(path, body):
                raise KeyReused(f"{HEADER}: the stream belongs to another request", param=HEADER)
            request.after = place
            return request
        head = JournalHead(path, body, call.id, call.identity, call.deadline - call.arrival, watched)
        store = self._shared if stored else self._local
        if not (resume.key or watched):
            return self._new(call, store, name, head)
        return await self._open(call, store, name, head)

    async def find(self, call: RequestContext, name: str, path: str, *, by_force: bool = False) -> JournaledRequest:
        """Return the request of a journal, and claim the journal unless a live router owns it.

        path: of its endpoint; empty: any. by_force: claim it in any case. Raises NotFound and RegistryUnavailable."""
        for store in dict.fromkeys((self._local, self._shared)):
            try:
                journal = await store.journals.read(call.tenant, name)
            except RegistryUnavailable as error:
                raise RegistryUnavailable(f"the answer cannot be resumed now: {error}") from error
            if journal is None:
                continue
            try:
                head, recording = JournalHead.unpacked(journal.head), Recording()
                recording.add(journal.entries)
            except WireError as error:
                raise NotFound(f"{name!r} was recorded by another version") from error
            if path not in ("", head.path):
                break
            ttl_s = self._life_s(head)
            followed = FollowedJournal(
                store.journals, call.tenant, name, self._owner, ttl_s, recording, may_claim=not head.watched
            )
            left_s = max(LEAST_TIME_S, head.timeout_s - journal.age_s)
            now = time.monotonic()
            call = replace(call, id=head.id, identity=head.identity, arrival=now, deadline=now + left_s)
            request = JournaledRequest(call, head, name, store.writer, self.metrics, followed, ttl_s)
            if by_force or not (head.watched or recording.has_ended or journal.is_owned):
                await followed.claim(by_force=by_force)
            if followed.is_own:
                request.write()
            return request
        raise NotFound(
            f"no events of {name!r} are kept: an answer can be resumed for {self.window_s:g} s after a break"
        )

    async def forget(self, tenant: str, name: str) -> None:
        """Let a journal expire within DELETED_LIFE_S. Raises RegistryUnavailable.

        Until then this router owns it, so that another router that writes it notices and stops."""
        for store in dict.fromkeys((self._local, self._shared)):
            store.writer.shorten(tenant, name, DELETED_LIFE_S)
            await store.journals.claim(tenant, name, self._owner, ttl_s=DELETED_LIFE_S, by_force=True)

    def _life_s(self, head: JournalHead) -> float:
        """Return how long a journal lives after its last write; a watched one, longer by its time limit."""
        return self.window_s + (head.timeout_s if head.watched else 0.0)

    async def _open(
        self, call: RequestContext, store: JournalStore, name: str, head: JournalHead
    ) -> JournaledRequest | None:
        packed = head.packed()
        if len(packed) > self._max_bytes:
            self.metrics.failures.labels("too_large").inc()
            return None
        unsure: Callable[[], Awaitable[object]] | None = None
        for each in dict.fromkeys((store, self._local)):
            release = partial(each.journals.release, call.tenant, name, self._owner, ttl_s=self._life_s(head))
            opening = each.journals.open(
                call.tenant, name, self._owner, packed, key=call.resume.key, ttl_s=self._life_s(head)
            )
            try:
                known = await owning(opening, release, keeps=RegistryUnavailable)
            except RegistryUnavailable:  # it may be open nevertheless
                unsure = release
                self.metrics.failures.labels("store").inc()
                continue
            if not known:
                request = self._new(call, each, name, head, is_opened=True)
                if request is not None and each is not store:
                    self._mirror(request, store, packed)
                return request
            if unsure is not None:
                release_soon(unsure)
            if known == "!":
                self.metrics.failures.labels("evicted").inc()
                return None
            request = await self.find(call, known, "")
            if not request.head.is_of(head.path, head.body):
                raise KeyReused(f"{KEY}: another request was sent with this key", param=KEY)
            return request
        return None

    def _new(
        self, call: RequestContext, store: JournalStore, name: str, head: JournalHead, *, is_opened: bool = False
    ) -> JournaledRequest | None:
        """Return a new request; None if it is too large. is_opened: the store already has its head."""
        ttl_s = self._life_s(head)
        without_body = replace(head, body=b"")  # the body would take memory for as long as the request runs
        request = JournaledRequest(call, without_body, name, store.writer, self.metrics, None, ttl_s)
        written = OpenJournal(
            call.tenant, name, ttl_s, head=head.packed(), is_opened=is_opened, key=call.resume.key, watched=head.watched
        )
        return request if request.write(written) else None

    def _mirror(self, request: JournaledRequest, store: JournalStore, head: bytes) -> None:
        """Record a request of this process in a store that does not answer now, too, once it does."""
        call, ttl_s, watched = request.call, self._life_s(request.head), request.head.watched
        other = OpenJournal(call.tenant, request.name, ttl_s, head=head, key=call.resume.key, watched=watched)
        if store.writer.begin(other):
            request.mirror_to(other)


class JournalStore:
    """Journals with their writer."""

    def __init__(self, journals: Journals, writer: JournalWriter) -> None:
        self.journals, self.writer = journals, writer


def _check_key(key: str) -> None:
    if len(key) > MAX_KEY or not key.isprintable() or not key.isascii():
        raise InvalidRequest(f"{KEY} must have at most {MAX_KEY} printable ASCII characters", param=KEY)

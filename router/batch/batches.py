"""Batches: creates, runs, cancels and resumes batches, also those of routers that died."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from types import TracebackType

from starlette.types import ASGIApp, Receive, Scope, Send

from kvferry.cluster_state.router_ownership import RouterOwnership
from kvferry.protocol.batch_metrics import BatchMetrics
from kvferry.protocol.errors import Draining, InvalidRequest, Overloaded, RegistryUnavailable, reason
from kvferry.protocol.settings import RouterSettings
from kvferry.router.batch.batch import ENDED, Batch
from kvferry.router.batch.batch_owners import BatchOwners
from kvferry.router.batch.disk_store import DiskStore
from kvferry.router.batch.files import DiskFailed, disk_failed
from kvferry.router.batch.runner import Runner, TenantGone
from kvferry.router.batch.stores import BatchStore, LostBatch, Place, TenantBatches, TenantFiles

MOST = 64
"""Largest number of unfinished batches per tenant."""
MOST_ENDED = 1000
"""Largest number of ended batches kept per tenant; the oldest are deleted."""
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0
"""Longest pause before a batch is retried after a disk error, in seconds."""
LONGEST_REDIS_WAIT_S = 2.0
"""The same while Redis does not answer; it is shorter, since asking Redis costs little."""

logger = logging.getLogger(__name__)


class Batches:
    """Batches that one router creates and runs.

    `serve` sets the application that answers their rows. Within the context the router also runs unfinished batches
    that no other process runs. On leaving, running batches stop and stay resumable.

    store  where files and batches are; None: on the settings' disk
    owned  leased work of this router; None: locks on the disk decide which process runs a batch
    """

    def __init__(
        self,
        settings: RouterSettings,
        store: BatchStore | None = None,
        owned: RouterOwnership | None = None,
        metrics: BatchMetrics | None = None,
    ) -> None:
        self._store = store or DiskStore(settings.data_folder, settings.files_mib * 2**20, locks=owned is None)
        self._owners = BatchOwners(self._store, owned)
        self._most_rows = settings.batch_rows
        self._row_s = settings.request_timeout
        self._app: ASGIApp | None = None
        self._live: Callable[[], int] = lambda: 0
        self._realm: Callable[[str], str] = lambda tenant: tenant
        self._exists: Callable[[str], bool] = lambda tenant: True
        self._endpoints: Collection[str] = ()
        self._tasks: dict[Place, asyncio.Task[None]] = {}
        self._rows = 0
        self._leaving = False
        self._metrics = metrics or BatchMetrics()
        self._metrics.running.set_function(lambda: len(self._tasks))

    def serve(
        self,
        app: ASGIApp,
        endpoints: Collection[str],
        live: Callable[[], int],
        realm: Callable[[str], str],
        exists: Callable[[str], bool],
    ) -> None:
        """Set the application that answers rows, which are POST requests to `endpoints`.

        `live` returns the number of requests in progress, rows included. `realm` returns a tenant's cache realm.
        `exists` returns whether a tenant has a key; without one its batches pause."""
        self._app, self._endpoints, self._live, self._realm = app, tuple(endpoints), live, realm
        self._exists = exists

    def files(self, tenant: str) -> TenantFiles:
        """Return a tenant's files."""
        return self._store.files(tenant)

    def of(self, tenant: str) -> TenantBatches:
        """Return a tenant's batches."""
        return self._store.batches(tenant)

    async def create(self, tenant: str, endpoint: str, file_id: str, metadata: dict[str, str] | None) -> Batch:
        """Create a batch, and start it unless another router should run it.

        Raises InvalidRequest, NotFound for the file, Overloaded, DiskFailed or RegistryUnavailable."""
        if endpoint not in self._endpoints:
            raise InvalidRequest(f"endpoint must be one of {', '.join(sorted(self._endpoints))}", param="endpoint")
        await self._store.start()
        kept = self.of(tenant)
        await self.files(tenant).get(file_id, "input_file_id")
        known = await kept.all()
        if sum(batch.status not in ENDED for batch in known) >= MOST:
            raise Overloaded(f"{MOST} batches are in progress", retry_after=30.0)
        batch = Batch.new(endpoint, file_id, tenant, metadata)
        try:
            await kept.create(batch)
            for old in [batch for batch in known if batch.status in ENDED][MOST_ENDED:]:
                await kept.forget(old.id)
        except OSError as error:
            raise disk_failed("the batch cannot be stored", error) from error
        place = self._store.place(batch)
        if await self._owners.begin(place, idle=not (self._tasks or self._leaving)) and not self._leaving:
            self._start(place)
        return batch

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Cancel a batch; raise NotFound, InvalidRequest if it has ended, DiskFailed or RegistryUnavailable."""
        kept = self.of(tenant)
        batch = await kept.get(batch_id)
        if batch.status in ENDED:
            raise InvalidRequest(f"the batch has already ended: its status is {batch.status}", param="batch_id")
        try:
            await kept.cancel(batch_id)
        except OSError as error:
            raise disk_failed("the batch cannot be cancelled", error) from error
        if not (self._owners.leased or self._leaving):
            self._start(self._store.place(batch))  # in case no process runs it
        return await kept.get(batch_id)

    async def __aenter__(self) -> Batches:
        await self._store.start()
        self._watching = asyncio.create_task(self._owners.watched(self._start, self._tasks, self.leave), name="batches")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.leave()
        await self._store.close()

    async def leave(self) -> None:
        """Stop all batches and leave them to other routers, since this process will end."""
        self._leaving = True
        self._watching.cancel()
        stopped = dict(self._tasks)
        for task in stopped.values():
            task.cancel()
        await asyncio.gather(self._watching, *stopped.values(), return_exceptions=True)
        await self._owners.give_up(stopped)

    def _start(self, place: Place) -> None:
        """Run a batch unless it is running; raise Draining if this process is shutting down."""
        if self._leaving:
            raise Draining("this router is shutting down and runs no batch")
        if place not in self._tasks:
            task = self._tasks[place] = asyncio.create_task(self._run(place))
            task.add_done_callback(lambda _: self._tasks.pop(place, None))

    async def _run(self, place: Place) -> None:
        """Run a batch, and resume it from its saved state when a failing store works again."""
        wait = FIRST_WAIT_S
        while True:
            began = time.monotonic()
            try:
                await self._run_once(place)
                return await self._owners.end(place)
            except TenantGone as gone:
                await self._wait_for_tenant(place, gone.tenant)
                continue
            except LostBatch:
                logger.warning("%s was taken over by another router", place.batch_id)
                return
            except (OSError, DiskFailed, RegistryUnavailable) as error:
                away = isinstance(error, RegistryUnavailable)
                if time.monotonic() - began > LONGEST_WAIT_S:
                    wait = FIRST_WAIT_S
                if wait == FIRST_WAIT_S:
                    logger.warning(
                        "%s waits for %s: %s", place.batch_id, "Redis" if away else "the disk", reason(error)
                    )
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_REDIS_WAIT_S if away else LONGEST_WAIT_S)

    async def _wait_for_tenant(self, place: Place, tenant: str) -> None:
        """Wait until the batch's tenant has a key again."""
        logger.warning("%s pauses: its tenant %s has no key", place.batch_id, tenant)
        while not self._exists(tenant):  # noqa: ASYNC110
            await asyncio.sleep(FIRST_WAIT_S)

    async def _run_once(self, place: Place) -> None:
        assert self._app is not None
        held = await self._store.hold(place)
        if held is None:
            return
        tenant = held.batch.tenant
        if held.batch.in_progress_at is not None:
            logger.info("resuming %s: %d rows", place.batch_id, held.batch.request_counts["total"])
            self._metrics.resumed.inc()
        try:
            await Runner(
                held, self._counted, width=self._width, row_s=self._row_s, realm=self._realm(tenant),
                gone=lambda: not self._exists(tenant), metrics=self._metrics,
            ).run()  # fmt: skip
        finally:
            await held.let_go()

    def _width(self) -> int:
        """Return how many rows each batch may run: its part of the allowed rows, less one for each live request."""
        live = max(0, self._live() - self._rows)
        return (self._most_rows - live) // max(1, len(self._tasks))

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._app is not None
        self._rows += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._rows -= 1

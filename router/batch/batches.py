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
from kvferry.router.batch.stores import BatchKey, BatchStore, LostBatch, TenantBatches, TenantFiles

MAX_UNFINISHED = 64
"""Maximum number of unfinished batches per tenant."""
MAX_ENDED = 1000
"""Maximum number of ended batches kept per tenant; the oldest are deleted."""
FIRST_WAIT_S, MAX_WAIT_S = 1.0, 30.0
"""Shortest and longest pause before a batch is retried after a disk error, in seconds."""
MAX_REDIS_WAIT_S = 2.0
"""Longest pause while Redis does not answer, in seconds; it is shorter, since a call of Redis costs little."""

logger = logging.getLogger(__name__)


class Batches:
    """Batches that one router creates and runs.

    `serve` sets the application that answers their rows. Within the context the router also runs unfinished batches
    that no other process runs. At its end, running batches stop and stay resumable.

    store  store of files and batches; None: the settings' data directory
    owned  tasks of this router under its lease; None: file locks decide which process runs a batch
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
        self._max_rows = settings.batch_rows
        self._row_s = settings.request_timeout
        self._app: ASGIApp | None = None
        self._requests_in_flight: Callable[[], int] = lambda: 0
        self._realm: Callable[[str], str] = lambda tenant: tenant
        self._exists: Callable[[str], bool] = lambda tenant: True
        self._endpoints: Collection[str] = ()
        self._tasks: dict[BatchKey, asyncio.Task[None]] = {}
        self._rows = 0
        self._stopping = False
        self._metrics = metrics or BatchMetrics()
        self._metrics.running.set_function(lambda: len(self._tasks))

    def serve(
        self,
        app: ASGIApp,
        endpoints: Collection[str],
        in_flight: Callable[[], int],
        realm: Callable[[str], str],
        exists: Callable[[str], bool],
    ) -> None:
        """Set the application that answers rows, which are POST requests to `endpoints`.

        `live` returns the number of requests in progress, rows included. `realm` returns a tenant's cache realm.
        `exists` returns whether a tenant has a key; without one its batches pause."""
        self._app, self._endpoints, self._requests_in_flight, self._realm = app, tuple(endpoints), in_flight, realm
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
        tenant_batches = self.of(tenant)
        await self.files(tenant).get(file_id, "input_file_id")
        known = await tenant_batches.all()
        if sum(batch.status not in ENDED for batch in known) >= MAX_UNFINISHED:
            raise Overloaded(f"{MAX_UNFINISHED} batches are in progress", retry_after=30.0)
        batch = Batch.new(endpoint, file_id, tenant, metadata)
        try:
            await tenant_batches.create(batch)
            for old in [batch for batch in known if batch.status in ENDED][MAX_ENDED:]:
                await tenant_batches.forget(old.id)
        except OSError as error:
            raise disk_failed("the batch cannot be stored", error) from error
        key = self._store.key(batch)
        if await self._owners.begin(key, idle=not (self._tasks or self._stopping)) and not self._stopping:
            self._start(key)
        return batch

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Cancel a batch; raise NotFound, InvalidRequest if it has ended, DiskFailed or RegistryUnavailable."""
        tenant_batches = self.of(tenant)
        batch = await tenant_batches.get(batch_id)
        if batch.status in ENDED:
            raise InvalidRequest(f"the batch has already ended: its status is {batch.status}", param="batch_id")
        try:
            await tenant_batches.cancel(batch_id)
        except OSError as error:
            raise disk_failed("the batch cannot be cancelled", error) from error
        if not (self._owners.leased or self._stopping):
            self._start(self._store.key(batch))  # in case no process runs it
        return await tenant_batches.get(batch_id)

    async def __aenter__(self) -> Batches:
        await self._store.start()
        self._watching = asyncio.create_task(self._owners.watch(self._start, self._tasks, self.stop), name="batches")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        await self._store.close()

    async def stop(self) -> None:
        """Stop all batches and release them to other routers, since this process will end."""
        self._stopping = True
        self._watching.cancel()
        stopped = dict(self._tasks)
        for task in stopped.values():
            task.cancel()
        await asyncio.gather(self._watching, *stopped.values(), return_exceptions=True)
        await self._owners.release(stopped)

    def _start(self, key: BatchKey) -> None:
        """Run a batch unless it is running; raise Draining if this process is shutting down."""
        if self._stopping:
            raise Draining("this router is shutting down and runs no batch")
        if key not in self._tasks:
            task = self._tasks[key] = asyncio.create_task(self._run(key))
            task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def _run(self, key: BatchKey) -> None:
        """Run a batch, and resume it from its saved state after errors of the store."""
        wait_s = FIRST_WAIT_S
        while True:
            began = time.monotonic()
            try:
                await self._run_once(key)
                return await self._owners.end(key)
            except TenantGone as gone:
                await self._wait_for_tenant(key, gone.tenant)
                continue
            except LostBatch:
                logger.warning("%s was taken over by another router", key.batch_id)
                return
            except (OSError, DiskFailed, RegistryUnavailable) as error:
                is_redis = isinstance(error, RegistryUnavailable)
                if time.monotonic() - began > MAX_WAIT_S:
                    wait_s = FIRST_WAIT_S
                if wait_s == FIRST_WAIT_S:
                    logger.warning(
                        "%s waits for %s: %s", key.batch_id, "Redis" if is_redis else "the disk", reason(error)
                    )
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_REDIS_WAIT_S if is_redis else MAX_WAIT_S)

    async def _wait_for_tenant(self, key: BatchKey, tenant: str) -> None:
        """Wait until the batch's tenant has a key again."""
        logger.warning("%s pauses: its tenant %s has no key", key.batch_id, tenant)
        while not self._exists(tenant):  # noqa: ASYNC110
            await asyncio.sleep(FIRST_WAIT_S)

    async def _run_once(self, key: BatchKey) -> None:
        assert self._app is not None
        held = await self._store.hold(key)
        if held is None:
            return
        tenant = held.batch.tenant
        if held.batch.in_progress_at is not None:
            logger.info("resuming %s: %d rows", key.batch_id, held.batch.request_counts["total"])
            self._metrics.resumed.inc()
        try:
            await Runner(
                held, self._counted, width=self._width, row_s=self._row_s, realm=self._realm(tenant),
                gone=lambda: not self._exists(tenant), metrics=self._metrics,
            ).run()  # fmt: skip
        finally:
            await held.release()

    def _width(self) -> int:
        """Return how many rows each batch may run: its part of the allowed rows, less one for each live request."""
        in_flight = max(0, self._requests_in_flight() - self._rows)
        return (self._max_rows - in_flight) // max(1, len(self._tasks))

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._app is not None
        self._rows += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._rows -= 1

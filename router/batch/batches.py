"""All batches of this router: created, tracked, and resumed after a restart."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType

from starlette.types import ASGIApp, Receive, Scope, Send

from kvferry.protocol.errors import InvalidRequest, NotFound, Overloaded, reason
from kvferry.protocol.settings import RouterSettings
from kvferry.router.batch.batch import ENDED, Batch, BatchFolder
from kvferry.router.batch.disk_threads import on_disk
from kvferry.router.batch.files import DiskFailed, FileStore, disk_failed, tenant_folder, tenant_folders
from kvferry.router.batch.runner import Runner, TenantGone
from kvferry.runtime.private_files import make_private

MOST = 64
"""Largest number of unfinished batches per tenant."""
MOST_ENDED = 1000
"""Largest number of ended batches kept per tenant; the oldest are deleted."""
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0
"""Longest pause before a batch is retried after a disk error, in seconds."""

logger = logging.getLogger(__name__)


class Batches:
    """Batches of one router.

    `serve` sets the application that answers their rows. On entering the context it resumes unfinished batches that no
    other process runs. On leaving, running batches stop and stay resumable."""

    def __init__(self, settings: RouterSettings) -> None:
        self._root = Path(settings.data_dir).expanduser() / settings.cluster
        self._limit = settings.files_mib * 2**20
        self._most_rows = settings.batch_rows
        self._row_s = settings.request_timeout
        self._app: ASGIApp | None = None
        self._live: Callable[[], int] = lambda: 0
        self._realm: Callable[[str], str] = lambda tenant: tenant
        self._exists: Callable[[str], bool] = lambda tenant: True
        self._endpoints: Collection[str] = ()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._rows = 0

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

    def files(self, tenant: str) -> FileStore:
        """Return a tenant's files."""
        return FileStore(self._root, tenant, self._limit)

    def folder(self, tenant: str) -> BatchFolder:
        """Return a tenant's batches."""
        return BatchFolder(self._root / tenant_folder(tenant))

    async def create(self, tenant: str, endpoint: str, file_id: str, metadata: dict[str, str] | None) -> Batch:
        """Create and start a batch; raise InvalidRequest, NotFound for the file, Overloaded or DiskFailed."""
        if endpoint not in self._endpoints:
            raise InvalidRequest(f"endpoint must be one of {', '.join(sorted(self._endpoints))}", param="endpoint")
        folder, files = self.folder(tenant), self.files(tenant)
        await on_disk(tenant, files.get, file_id, "input_file_id")
        known = await on_disk(tenant, folder.all)
        if sum(batch.status not in ENDED for batch in known) >= MOST:
            raise Overloaded(f"{MOST} batches are in progress", retry_after=30.0)
        batch = Batch.new(endpoint, file_id, tenant, metadata)
        try:
            await on_disk(tenant, folder.create, batch)
            for old in [batch for batch in known if batch.status in ENDED][MOST_ENDED:]:
                await on_disk(tenant, folder.forget, old.id)
        except OSError as error:
            folder.forget(batch.id)
            raise disk_failed("the batch cannot be stored", error) from error
        self._start(batch, folder)
        return batch

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Cancel a batch; raise NotFound, InvalidRequest if it has ended, or DiskFailed."""
        folder = self.folder(tenant)
        batch = await on_disk(tenant, folder.get, batch_id)
        if batch.status in ENDED:
            raise InvalidRequest(f"the batch has already ended: its status is {batch.status}", param="batch_id")
        try:
            await on_disk(tenant, folder.cancel, batch_id)
        except OSError as error:
            raise disk_failed("the batch cannot be cancelled", error) from error
        if batch_id not in self._tasks:
            self._start(batch, folder)  # in case no process runs it
        return await on_disk(tenant, folder.get, batch_id)

    async def __aenter__(self) -> Batches:
        await asyncio.to_thread(make_private, self._root)
        for batch, folder in await asyncio.to_thread(self._left_over):
            logger.info("resuming %s: %d rows", batch.id, batch.request_counts["total"])
            self._start(batch, folder)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _left_over(self) -> list[tuple[Batch, BatchFolder]]:
        folders = [BatchFolder(path) for path in tenant_folders(self._root)]
        return [(batch, folder) for folder in folders for batch in folder.all() if batch.status not in ENDED]

    def _start(self, batch: Batch, folder: BatchFolder) -> None:
        task = self._tasks[batch.id] = asyncio.create_task(self._run(batch, folder))
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    async def _run(self, batch: Batch, folder: BatchFolder) -> None:
        """Run a batch, and resume it from its saved state when a failing disk works again."""
        wait, known = FIRST_WAIT_S, batch
        while True:
            began = time.monotonic()
            try:
                return await self._run_once(known, folder)
            except TenantGone:
                await self._wait_for_tenant(batch)
                continue
            except (OSError, DiskFailed) as error:
                if time.monotonic() - began > LONGEST_WAIT_S:
                    wait = FIRST_WAIT_S
                if wait == FIRST_WAIT_S:
                    logger.warning("%s waits for the disk: %s", batch.id, reason(error))
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)
            try:
                known = await on_disk(batch.tenant, folder.get, batch.id)
            except NotFound:
                logger.warning("%s can no longer be read", batch.id)
                return
            if known.status in ENDED:  # ended by another process
                return

    async def _wait_for_tenant(self, batch: Batch) -> None:
        """Wait until the batch's tenant has a key again."""
        logger.warning("%s pauses: its tenant %s has no key", batch.id, batch.tenant)
        while not self._exists(batch.tenant):  # noqa: ASYNC110
            await asyncio.sleep(FIRST_WAIT_S)

    async def _run_once(self, batch: Batch, folder: BatchFolder) -> None:
        assert self._app is not None
        lock = await on_disk(batch.tenant, folder.lock, batch.id)
        if lock is None:
            return
        with lock:
            files = self.files(batch.tenant)
            await Runner(
                batch, folder, files, self._counted,
                width=self._width, row_s=self._row_s, realm=self._realm(batch.tenant),
                gone=lambda: not self._exists(batch.tenant),
            ).run()  # fmt: skip

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

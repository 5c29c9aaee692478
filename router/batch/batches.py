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
from kvferry.router.batch.files import DiskFailed, FileStore, disk_failed, tenant_folder, tenant_folders
from kvferry.router.batch.runner import Runner

MOST = 64
"""Batches of one tenant that have not ended."""
MOST_ENDED = 1000
"""Of one tenant are told of; the oldest are forgotten."""
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0
"""Until a batch whose disk failed is tried again."""

logger = logging.getLogger(__name__)


class Batches:
    """`serve` says what answers their rows; entered as a context, it resumes what an earlier process left and no
    process runs now. On leaving, what runs stops where it is."""

    def __init__(self, settings: RouterSettings) -> None:
        self._root = Path(settings.data_dir).expanduser() / settings.cluster
        self._limit = settings.files_mib * 2**20
        self._most_rows = settings.batch_rows
        self._row_s = settings.request_timeout
        self._app: ASGIApp | None = None
        self._live: Callable[[], int] = lambda: 0
        self._realm: Callable[[str], str] = lambda tenant: tenant
        self._endpoints: Collection[str] = ()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._rows = 0

    def serve(
        self, app: ASGIApp, endpoints: Collection[str], live: Callable[[], int], realm: Callable[[str], str]
    ) -> None:
        """`app` answers rows: those that POST to `endpoints`.

        `live`: requests in progress, rows included. `realm`: a tenant's, for its rows' calls."""
        self._app, self._endpoints, self._live, self._realm = app, tuple(endpoints), live, realm

    def files(self, tenant: str) -> FileStore:
        return FileStore(self._root, tenant, self._limit)

    def folder(self, tenant: str) -> BatchFolder:
        return BatchFolder(self._root / tenant_folder(tenant))

    async def create(self, tenant: str, endpoint: str, file_id: str, metadata: dict[str, str] | None) -> Batch:
        """Raises InvalidRequest, NotFound for the file, Overloaded, DiskFailed."""
        if endpoint not in self._endpoints:
            raise InvalidRequest(f"endpoint must be one of {', '.join(sorted(self._endpoints))}", param="endpoint")
        folder, files = self.folder(tenant), self.files(tenant)
        await asyncio.to_thread(files.get, file_id, "input_file_id")
        known = await asyncio.to_thread(folder.all)
        if sum(batch.status not in ENDED for batch in known) >= MOST:
            raise Overloaded(f"{MOST} batches have not ended yet", retry_after=30.0)
        batch = Batch.new(endpoint, file_id, tenant, metadata)
        try:
            await asyncio.to_thread(folder.create, batch)
            for old in [batch for batch in known if batch.status in ENDED][MOST_ENDED:]:
                await asyncio.to_thread(folder.forget, old.id)
        except OSError as error:
            folder.forget(batch.id)
            raise disk_failed("the batch cannot be kept", error) from error
        self._start(batch, folder)
        return batch

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Raises NotFound; InvalidRequest for one that has ended; DiskFailed."""
        folder = self.folder(tenant)
        batch = await asyncio.to_thread(folder.get, batch_id)
        if batch.status in ENDED:
            raise InvalidRequest(f"the batch has ended: it is {batch.status}", param="batch_id")
        try:
            await asyncio.to_thread(folder.cancel, batch_id)
        except OSError as error:
            raise disk_failed("the batch cannot be cancelled", error) from error
        if batch_id not in self._tasks:
            self._start(batch, folder)  # nobody may be running it
        return await asyncio.to_thread(folder.get, batch_id)

    async def __aenter__(self) -> Batches:
        for batch, folder in await asyncio.to_thread(self._left_over):
            logger.info("%s goes on: %d rows", batch.id, batch.request_counts["total"])
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
        """A disk that fails ends no batch: it goes on from what is kept there once that can be written again."""
        wait, known = FIRST_WAIT_S, batch
        while True:
            began = time.monotonic()
            try:
                return await self._run_once(known, folder)
            except (OSError, DiskFailed) as error:
                if time.monotonic() - began > LONGEST_WAIT_S:
                    wait = FIRST_WAIT_S
                if wait == FIRST_WAIT_S:
                    logger.warning("%s waits for the disk: %s", batch.id, reason(error))
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)
            try:
                known = await asyncio.to_thread(folder.get, batch.id)
            except NotFound:
                logger.warning("%s cannot be read any more", batch.id)
                return
            if known.status in ENDED:  # by another process
                return

    async def _run_once(self, batch: Batch, folder: BatchFolder) -> None:
        assert self._app is not None
        lock = await asyncio.to_thread(folder.lock, batch.id)
        if lock is None:
            return
        with lock:
            files = self.files(batch.tenant)
            await Runner(
                batch, folder, files, self._counted,
                width=self._width, row_s=self._row_s, realm=self._realm(batch.tenant),
            ).run()  # fmt: skip

    def _width(self) -> int:
        """How many rows each batch may have in progress: its share of those allowed, less one for each live request."""
        live = max(0, self._live() - self._rows)
        return (self._most_rows - live) // max(1, len(self._tasks))

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._app is not None
        self._rows += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._rows -= 1

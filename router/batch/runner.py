"""Batch runner: executes a few rows at a time with the lowest priority."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from kvferry.protocol.errors import NotFound
from kvferry.router.batch.batch import Batch, BatchFolder
from kvferry.router.batch.disk_threads import on_disk
from kvferry.router.batch.files import DiskFailed, FileStore
from kvferry.router.batch.internal_client import ask
from kvferry.router.batch.rows import MAX_ERRORS, InvalidRow, Row, answer_row, answered, read_rows, unanswered_row
from kvferry.router.request_context import RequestContext
from kvferry.runtime.private_files import private

LATER = (429, 503)
"""Statuses after which a row is tried again: no capacity or no node now."""
PRIORITY = 1_000_000
"""Priority of a batch's calls: all calls with default priority are served before them."""
SAVE_S = 0.5
LONGEST_WAIT_S = 30.0

logger = logging.getLogger(__name__)


class TenantGone(Exception):
    """The batch's tenant is no longer in the keys file."""


class Runner:
    """Runner of one batch, whose lock the owner holds; `width` returns how many rows may run now."""

    def __init__(
        self,
        batch: Batch,
        folder: BatchFolder,
        files: FileStore,
        app: ASGIApp,
        *,
        width: Callable[[], int],
        row_s: float,
        realm: str,
        gone: Callable[[], bool],
    ) -> None:
        self._batch, self._folder, self._files, self._app = batch, folder, files, app
        self._width, self._row_s, self._realm, self._gone = width, row_s, realm, gone
        self._running = 0
        self._freed = asyncio.Event()
        self._saved = 0.0
        self._failure: BaseException | None = None
        self._writes: set[asyncio.Future[None]] = set()
        self._outputs = {ok: folder.folder(batch.id) / f"{'output' if ok else 'errors'}.jsonl" for ok in (True, False)}

    async def run(self) -> None:
        """Run the batch to its end.

        Raises CancelledError when the process ends, TenantGone, and OSError or DiskFailed if the disk fails. Another
        run then resumes from the saved state."""
        batch = self._batch
        try:
            path = await on_disk(self._batch.tenant, self._files.path, batch.input_file_id)
            wrong = await on_disk(self._batch.tenant, self._validate, path)
            if wrong:
                batch.fail(wrong)
                await asyncio.shield(self._save())
                return
            done = [await on_disk(self._batch.tenant, answered, self._outputs[ok]) for ok in (True, False)]
            batch.request_counts.update(completed=len(done[0]), failed=len(done[1]))
            if batch.in_progress_at is None:
                batch.move("in_progress")
            await self._save()
            ended = await self._answer_all(path, done[0] | done[1])
            await self._finish(ended)
        except (asyncio.CancelledError, TenantGone):
            with contextlib.suppress(OSError):
                await asyncio.shield(self._save())
            raise
        except Exception as error:
            if isinstance(error, (OSError, DiskFailed)) and time.time() < batch.expires_at:
                raise
            logger.exception("%s failed", batch.id)
            batch.fail([InvalidRow(0, f"the batch cannot continue: {error}", code="server_error").shown()])
        await asyncio.shield(self._save())

    def _validate(self, path: Path) -> list[dict[str, Any]]:
        """Return the errors of invalid lines, and count the valid ones."""
        wrong, total = [], 0
        for row in read_rows(path, self._batch.endpoint):
            total += isinstance(row, Row)
            if isinstance(row, InvalidRow):
                wrong.append(row.shown())
                if len(wrong) == MAX_ERRORS:
                    break
        if not total and not wrong:
            wrong.append(InvalidRow(1, "the file has no requests", code="empty_file").shown())
        self._batch.request_counts["total"] = total
        return wrong

    async def _answer_all(self, path: Path, done: set[str]) -> str:
        """Answer all rows and return the state in which the batch ends."""
        tasks: set[asyncio.Task[None]] = set()
        rows = read_rows(path, self._batch.endpoint)
        left: Iterator[Row] = (row for row in rows if isinstance(row, Row) and row.custom_id not in done)
        try:
            while True:
                if self._failure is not None:
                    raise self._failure
                if self._gone():
                    raise TenantGone
                if ending := self._ending():
                    break
                if self._running >= max(1, self._width()):
                    self._freed.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(SAVE_S):  # wait_for may lose a cancellation
                            await self._freed.wait()
                    continue
                row = await on_disk(self._batch.tenant, next, left, None)
                if row is None and not tasks:
                    break
                if row is None:
                    await asyncio.wait(tasks, timeout=SAVE_S, return_when=asyncio.FIRST_EXCEPTION)
                    continue
                self._running += 1
                task = asyncio.create_task(self._answer(row))
                tasks.add(task)
                task.add_done_callback(lambda task: self._settle(task, tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*self._writes, return_exceptions=True)
        if self._failure is not None:
            raise self._failure
        if ending == "expired":
            rest = await on_disk(
                self._batch.tenant, lambda: _unanswered(path, self._batch.endpoint, self._outputs.values())
            )
            for custom_id in rest:
                await self._write(unanswered_row(custom_id, "batch_expired", "not answered within 24 hours"), ok=False)
        return ending or "completed"

    def _settle(self, task: asyncio.Task[None], tasks: set[asyncio.Task[None]]) -> None:
        tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()

    def _ending(self) -> str:
        """Return why no further row may begin: cancelled, expired, or an empty string."""
        if self._folder.cancelling(self._batch.id):
            if self._batch.status != "cancelling":
                self._batch.move("cancelling")
            return "cancelled"
        return "expired" if time.time() > self._batch.expires_at else ""

    async def _answer(self, row: Row) -> None:
        try:
            wait = 0.5
            while True:
                call = self._call()
                status, headers, body = await ask(self._app, self._batch.endpoint, call, row.body)
                if status not in LATER:
                    break
                with contextlib.suppress(ValueError):
                    wait = max(wait, float(headers.get("retry-after", "")))
                await asyncio.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT_S)
            await self._write(answer_row(row.custom_id, status, call.id, body), ok=status == 200)
            if time.monotonic() > self._saved + SAVE_S:
                await self._save()
        finally:
            self._running -= 1
            self._freed.set()

    def _call(self) -> RequestContext:
        now = time.monotonic()
        name = uuid.uuid4().hex
        tenant = self._batch.tenant
        return RequestContext(
            name, arrival=now, deadline=now + self._row_s, tenant=tenant, realm=self._realm, priority=PRIORITY
        )

    async def _write(self, row: dict[str, Any], *, ok: bool) -> None:
        """Write and count a row, even if the caller is cancelled meanwhile."""
        line = json.dumps(row, ensure_ascii=False).encode() + b"\n"

        def append() -> None:
            with open(self._outputs[ok], "ab", opener=private) as out:
                out.write(line)

        def written(future: asyncio.Future[None]) -> None:
            self._writes.discard(future)
            if not future.cancelled() and future.exception() is None:
                self._batch.request_counts["completed" if ok else "failed"] += 1

        writing = asyncio.ensure_future(on_disk(self._batch.tenant, append))
        self._writes.add(writing)
        writing.add_done_callback(written)
        await asyncio.shield(writing)

    async def _finish(self, ended: str) -> None:
        """Publish the outputs as files.

        Each file's id is saved before the next step, so that a later run does not publish it again."""
        batch = self._batch
        if ended == "completed":
            batch.move("finalizing")
        for ok, field in ((True, "output_file_id"), (False, "error_file_id")):
            if getattr(batch, field) is None:
                made = await on_disk(self._batch.tenant, self._publish, ok)
                setattr(batch, field, made)
                try:
                    await self._save()
                except OSError:
                    if made is not None:  # its id could not be saved
                        setattr(batch, field, None)
                        with contextlib.suppress(OSError, NotFound):
                            await on_disk(self._batch.tenant, self._files.delete, made)
                    raise
        batch.move(ended)
        await self._save()
        for path in self._outputs.values():
            path.unlink(missing_ok=True)

    def _publish(self, ok: bool) -> str | None:
        path = self._outputs[ok]
        if not path.exists():
            return None
        with path.open("rb") as content:
            name = f"{self._batch.id}_{'output' if ok else 'error'}.jsonl"
            return self._files.add(content, name, "batch_output").id

    async def _save(self) -> None:
        self._saved = time.monotonic()
        await on_disk(self._batch.tenant, self._folder.save, self._batch)


def _unanswered(path: Path, endpoint: str, outputs: Iterable[Path]) -> list[str]:
    done = set[str]().union(*map(answered, outputs))
    return [row.custom_id for row in read_rows(path, endpoint) if isinstance(row, Row) and row.custom_id not in done]

"""Runner: executes one batch, a few rows at a time with the lowest priority, and publishes its outputs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.types import ASGIApp

from kvferry.protocol.batch_metrics import BatchMetrics
from kvferry.protocol.errors import RegistryUnavailable
from kvferry.router.batch.files import DiskFailed
from kvferry.router.batch.internal_client import ask
from kvferry.router.batch.rows import MAX_ERRORS, InvalidRow, Row, RowReader, answer_row, unanswered_row
from kvferry.router.batch.stores import HeldBatch, LostBatch
from kvferry.router.request_context import RequestContext

RETRYABLE = (429, 503)
"""Statuses after which a row is retried: no capacity or no node now."""
PRIORITY = 1_000_000
"""Priority of a batch's calls: all calls with default priority are served before them."""
SAVE_S = 0.5
"""Interval at which a running batch is saved and checked for cancellation, in seconds."""
MAX_WAIT_S = 30.0
"""Longest pause before a row is retried, in seconds."""
STOP_S = 2.0
"""Longest wait for writes in progress when a batch stops, in seconds."""

logger = logging.getLogger(__name__)


class TenantGone(Exception):
    """The batch's tenant is no longer in the keys file."""

    def __init__(self, tenant: str) -> None:
        super().__init__(tenant)
        self.tenant = tenant


class Runner:
    """Runner of one batch that this process holds; `width` returns how many rows may run now."""

    def __init__(
        self,
        held: HeldBatch,
        app: ASGIApp,
        *,
        width: Callable[[], int],
        row_s: float,
        realm: str,
        gone: Callable[[], bool],
        metrics: BatchMetrics,
    ) -> None:
        self._held, self._batch, self._app = held, held.batch, app
        self._width, self._row_s, self._realm, self._tenant_gone = width, row_s, realm, gone
        self._running = 0
        self._row_ended = asyncio.Event()
        self._saved = 0.0
        self._failure: BaseException | None = None
        self._writes: set[asyncio.Future[None]] = set()
        self._metrics = metrics

    async def run(self) -> None:
        """Run the batch to its end.

        Raises CancelledError when the process ends, TenantGone, LostBatch if another router took the batch over, and
        OSError, DiskFailed or RegistryUnavailable if the store fails. Another run then resumes from the saved state."""
        batch = self._batch
        try:
            if batch.in_progress_at is None:
                errors = await self._validate()
                if errors:
                    batch.fail(errors)
                    await asyncio.shield(self._end())
                    return
                batch.move("in_progress")
                await self._save()
            ended = await self._answer_all()
            await self._finish(ended)
            return
        except (asyncio.CancelledError, TenantGone):
            with contextlib.suppress(OSError, LostBatch):
                async with asyncio.timeout(STOP_S):
                    await asyncio.shield(self._save())
            raise
        except LostBatch:
            raise
        except Exception as error:
            if isinstance(error, (OSError, DiskFailed, RegistryUnavailable)) and time.time() < batch.expires_at:
                raise
            logger.exception("%s failed", batch.id)
            batch.fail([InvalidRow(0, f"the batch cannot continue: {error}", code="server_error").shown()])
        await asyncio.shield(self._end())

    async def _validate(self) -> list[dict[str, Any]]:
        """Return the errors of invalid lines, and count the valid ones."""
        errors, total = [], 0
        async for row in self._rows():
            total += isinstance(row, Row)
            if isinstance(row, InvalidRow):
                errors.append(row.shown())
                if len(errors) == MAX_ERRORS:
                    break
        if not total and not errors:
            errors.append(InvalidRow(1, "the file has no requests", code="empty_file").shown())
        self._batch.request_counts["total"] = total
        return errors

    async def _rows(self) -> AsyncIterator[Row | InvalidRow]:
        """Yield the input's rows; long content is read on threads."""
        reader = RowReader(self._batch.endpoint, self._batch.id)
        async for piece in await self._held.input():
            for row in await asyncio.to_thread(reader.feed, piece):
                yield row
        for row in reader.end():
            yield row

    async def _unanswered(self) -> AsyncIterator[Row]:
        """Yield the rows without an answer."""
        async for row in self._rows():
            if isinstance(row, Row) and not self._held.answered(row):
                yield row

    async def _answer_all(self) -> str:
        """Answer all rows and return the state in which the batch ends."""
        tasks: set[asyncio.Task[None]] = set()
        unanswered = self._unanswered()
        try:
            while True:
                if self._failure is not None:
                    raise self._failure
                if self._tenant_gone():
                    raise TenantGone(self._batch.tenant)
                if ending := await self._ending():
                    break
                if self._running >= max(1, self._width()):
                    self._row_ended.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(SAVE_S):  # wait_for may lose a cancellation
                            await self._row_ended.wait()
                    continue
                row = await anext(unanswered, None)
                if row is None and not tasks:
                    break
                if row is None:
                    await asyncio.wait(tasks, timeout=SAVE_S, return_when=asyncio.FIRST_EXCEPTION)
                    continue
                self._running += 1
                task = asyncio.create_task(self._answer(row))
                tasks.add(task)
                task.add_done_callback(lambda task: self._collect(task, tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._writes:
                _, slow = await asyncio.wait(self._writes, timeout=STOP_S)
                for each in slow:
                    each.cancel()
        if self._failure is not None:
            raise self._failure
        if ending == "expired":
            async for row in self._unanswered():
                line = unanswered_row(row.custom_id, "batch_expired", "not answered within 24 hours")
                await self._write(row, line, ok=False)
        return ending or "completed"

    def _collect(self, task: asyncio.Task[None], tasks: set[asyncio.Task[None]]) -> None:
        tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()

    async def _ending(self) -> str:
        """Return why no further row may begin: cancelled, expired, or an empty string."""
        if await self._held.cancelling():
            if self._batch.status != "cancelling":
                self._batch.move("cancelling")
            return "cancelled"
        return "expired" if time.time() > self._batch.expires_at else ""

    async def _answer(self, row: Row) -> None:
        try:
            wait_s = 0.5
            while True:
                call = self._call()
                status, headers, body = await ask(self._app, self._batch.endpoint, call, row.body)
                if status not in RETRYABLE:
                    break
                with contextlib.suppress(ValueError):
                    wait_s = max(wait_s, float(headers.get("retry-after", "")))
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, MAX_WAIT_S)
            await self._write(row, answer_row(row.custom_id, status, call.id, body), ok=status == 200)
            if time.monotonic() > self._saved + SAVE_S:
                await self._save()
        finally:
            self._running -= 1
            self._row_ended.set()

    def _call(self) -> RequestContext:
        now = time.monotonic()
        name = uuid.uuid4().hex
        tenant = self._batch.tenant
        return RequestContext(
            name, arrival=now, deadline=now + self._row_s, tenant=tenant, realm=self._realm, priority=PRIORITY,
            is_background=True,
        )  # fmt: skip

    async def _write(self, row: Row, answer: dict[str, Any], *, ok: bool) -> None:
        """Write and count a row, even if the caller is cancelled meanwhile."""
        line = json.dumps(answer, ensure_ascii=False).encode() + b"\n"

        def written(future: asyncio.Future[None]) -> None:
            self._writes.discard(future)
            if not future.cancelled() and future.exception() is None:
                self._batch.request_counts["completed" if ok else "failed"] += 1
                self._metrics.rows.labels("ok" if ok else "failed").inc()

        writing = asyncio.ensure_future(self._held.write(row, line, ok=ok))
        self._writes.add(writing)
        writing.add_done_callback(written)
        await asyncio.shield(writing)

    async def _finish(self, ended: str) -> None:
        """Publish outputs and errors as files, with ids derived from the batch's id, so that a later run finds them."""
        batch = self._batch
        if ended == "completed":
            batch.move("finalizing")
        for ok, field in ((True, "output_file_id"), (False, "error_file_id")):
            if getattr(batch, field) is None:
                setattr(batch, field, await self._held.publish(ok=ok))
                await self._save()
        batch.move(ended)
        await self._end()

    async def _end(self) -> None:
        """Save the ended batch and delete its intermediate answers."""
        await self._save()
        await self._held.clear()

    async def _save(self) -> None:
        self._saved = time.monotonic()
        await self._held.save()

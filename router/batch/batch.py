"""Persistent state of one batch: its description, progress and lock."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from kvferry.protocol.errors import NotFound
from kvferry.router.batch.files import write_whole
from kvferry.runtime.private_files import make_private_folder, private

ENDED = ("completed", "failed", "cancelled", "expired")
"""Final states of a batch."""
WINDOW_S = 24 * 3600
_ID = re.compile(r"batch_[0-9a-f]{32}")


@dataclass(slots=True)
class Batch:
    """Batch as the API shows it, with its `tenant`; times are seconds since 1970.

    After creation only the holder of its lock changes it."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    completion_window: str = "24h"
    status: str = "validating"
    metadata: dict[str, str] | None = None
    errors: dict[str, Any] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: dict[str, int] = field(default_factory=lambda: {"total": 0, "completed": 0, "failed": 0})
    tenant: str = ""

    @classmethod
    def new(cls, endpoint: str, file_id: str, tenant: str, metadata: dict[str, str] | None) -> Batch:
        """Create a batch that is to be validated."""
        now = int(time.time())
        return cls(
            f"batch_{uuid.uuid4().hex}", endpoint, file_id, now, now + WINDOW_S, metadata=metadata, tenant=tenant
        )

    def move(self, status: str) -> None:
        """Change the state and record the time."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))

    def fail(self, errors: list[dict[str, Any]]) -> None:
        """Change to the state failed, with these errors."""
        self.move("failed")
        self.errors = {"object": "list", "data": errors}

    def shown(self) -> dict[str, Any]:
        """Return the batch as the API shows it."""
        told = {"object": "batch", **asdict(self)}
        del told["tenant"]
        return told


class BatchFolder:
    """Folder of one tenant's batches below `root`; its methods block on disk I/O."""

    def __init__(self, root: Path) -> None:
        self.root = root / "batches"

    def create(self, batch: Batch) -> None:
        """Create the batch's folder and save the batch."""
        make_private_folder(self.folder(batch.id))
        self.save(batch)

    def folder(self, batch_id: str) -> Path:
        """Return the path of a batch's folder."""
        return self.root / batch_id

    def save(self, batch: Batch) -> None:
        """Save the batch atomically."""
        write_whole(self.folder(batch.id) / "batch.json", json.dumps(asdict(batch)))

    def get(self, batch_id: str) -> Batch:
        """Return a batch as last saved, or as cancelling if that was requested; raise NotFound."""
        try:
            if not _ID.fullmatch(batch_id):
                raise FileNotFoundError
            batch = Batch(**json.loads((self.folder(batch_id) / "batch.json").read_bytes()))
        except (OSError, ValueError, TypeError):
            raise NotFound(f"there is no batch {batch_id!r}", param="batch_id") from None
        if batch.status not in ENDED and self.cancelling(batch_id):
            batch.move("cancelling")
        return batch

    def all(self) -> list[Batch]:
        """Return all readable batches, newest first."""
        batches = []
        for path in self.root.glob("batch_*/batch.json"):
            with contextlib.suppress(NotFound):
                batches.append(self.get(path.parent.name))
        return sorted(batches, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    def forget(self, batch_id: str) -> None:
        """Delete an ended batch; its input and output files stay."""
        shutil.rmtree(self.folder(batch_id), ignore_errors=True)

    def cancel(self, batch_id: str) -> None:
        """Ask the process that runs the batch to cancel it."""
        (self.folder(batch_id) / "cancel").touch(0o600)

    def cancelling(self, batch_id: str) -> bool:
        """Return whether a cancellation was requested."""
        return (self.folder(batch_id) / "cancel").exists()

    def lock(self, batch_id: str) -> IO[bytes] | None:
        """Lock the batch until the returned file is closed or the process ends; None if another holder has it."""
        path = str(self.folder(batch_id) / "lock")
        lock = os.fdopen(private(path, os.O_WRONLY | os.O_CREAT), "wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            return None
        return lock

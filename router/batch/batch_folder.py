"""BatchFolder: a tenant's batches on disk, with records, numbered holders, locks and cancel marks. Its methods block.

<id>/batch.json      the batch as it was created
<id>/cancel          exists if cancellation was requested
<id>/lock            file lock of the process that runs the batch, if routers have no leases
<id>/owner-<n>/      files of the holder with number n: output.jsonl, errors.jsonl, and batch.json, the batch with the
                     valid bytes of earlier holders' files

The highest number holds the batch. Later writes of an earlier holder are past the valid bytes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import IO

from kvferry.protocol.errors import NotFound
from kvferry.router.batch.batch import ENDED, Batch, check_batch_id, no_batch
from kvferry.runtime.private_files import make_private_folder, private, write_whole

_OWNER = re.compile(r"owner-(\d{1,9})")
Earlier = dict[str, list[tuple[int, int]]]
"""Name of a file with answers → numbers of earlier holders, in order, with the valid bytes of their files."""


class BatchFolder:
    """Folder of one tenant's batches below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root / "batches"

    def create(self, batch: Batch) -> None:
        """Create the batch's folder and save the batch."""
        make_private_folder(self.folder(batch.id))
        self.save(batch)

    def folder(self, batch_id: str, owner: int = 0) -> Path:
        """Return the path of a batch's folder, or of one holder's."""
        return self.root / batch_id / f"owner-{owner}" if owner else self.root / batch_id

    def save(self, batch: Batch, owner: int = 0, earlier: Earlier | None = None) -> None:
        """Save the batch atomically."""
        text = batch.record() if earlier is None else json.dumps({**asdict(batch), "earlier": earlier})
        write_whole(self.folder(batch.id, owner) / "batch.json", text)

    def get(self, batch_id: str) -> Batch:
        """Return a batch as last saved, or as cancelling if that was requested; raise NotFound."""
        check_batch_id(batch_id)
        batch = self.saved(batch_id)[0]
        if batch.status not in ENDED and self.cancelling(batch_id):
            batch.move("cancelling")
        return batch

    def saved(self, batch_id: str) -> tuple[Batch, int, Earlier]:
        """Return a batch as its last holder saved it, that holder's number and the valid bytes; raise NotFound."""
        for owner in (*self.owners(batch_id), 0):
            with contextlib.suppress(OSError, ValueError, TypeError):
                record = json.loads((self.folder(batch_id, owner) / "batch.json").read_bytes())
                earlier = record.pop("earlier", {}) if isinstance(record, dict) else {}
                return Batch(**record), owner, earlier
        raise no_batch(batch_id)

    def owners(self, batch_id: str) -> list[int]:
        """Return the numbers of all holders, the highest first."""
        with contextlib.suppress(OSError):
            names = (_OWNER.fullmatch(name) for name in os.listdir(self.folder(batch_id)))
            return sorted((int(name[1]) for name in names if name), reverse=True)
        return []

    def all(self) -> list[Batch]:
        """Return all readable batches, newest first."""
        batches = []
        for batch_id in self.ids():
            with contextlib.suppress(NotFound):
                batches.append(self.get(batch_id))
        return sorted(batches, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    def ids(self) -> list[str]:
        """Return the ids of all batches."""
        return [path.parent.name for path in self.root.glob("batch_*/batch.json")]

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
        """Lock the batch until the returned file is closed or the process ends; None if another process has it."""
        path = str(self.folder(batch_id) / "lock")
        lock = os.fdopen(private(path, os.O_WRONLY | os.O_CREAT), "wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            return None
        return lock

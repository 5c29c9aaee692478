"""HeldFolder: a batch's folder as its current holder sees it; appends answers behind those of earlier holders.

All functions block."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from kvferry.router.batch.batch import ENDED, Batch
from kvferry.router.batch.batch_folder import BatchFolder, Earlier
from kvferry.router.batch.files import FileStore
from kvferry.router.batch.stores import LostBatch
from kvferry.runtime.private_files import private

FILE_NAMES = {True: "output.jsonl", False: "errors.jsonl"}
"""Names of the files with the answers of rows that succeeded, and of rows that failed."""


class HeldFolder:
    """One holder's view of a batch: `batch`, ids of answered rows, and its own files after those of earlier holders.

    lock: closed with the folder; None if leases decide which router may hold a batch."""

    def __init__(self, folder: BatchFolder, batch: Batch, owner: int, lock: IO[bytes] | None) -> None:
        self.batch, self.done = batch, set[str]()
        self._folder, self._owner, self._lock = folder, owner, lock
        self._earlier: Earlier = {}

    def take(self, previous: int, earlier: Earlier) -> None:
        """Continue after the previous holder's answers, and save the batch under this holder's number."""
        for ok, name in FILE_NAMES.items():
            own = (previous, complete_bytes(self._path(previous, name)))
            self._earlier[name] = [*((owner, size) for owner, size in earlier.get(name, ())), own]
            found = set[str]()
            for owner, size in self._earlier[name]:
                found.update(ids_of(self._path(owner, name), size))
            self.batch.request_counts["completed" if ok else "failed"] = len(found)
            self.done |= found
        self.save()

    def save(self) -> None:
        """Save the batch; raise LostBatch or OSError."""
        self.check()
        self._folder.save(self.batch, self._owner, self._earlier)

    def check(self) -> bool:
        """Return whether cancellation was requested; raise LostBatch if another process holds the batch."""
        if self._folder.owners(self.batch.id)[:1] != [self._owner]:
            raise LostBatch
        return self._folder.cancelling(self.batch.id)

    def append(self, custom_id: str, line: bytes, *, ok: bool) -> None:
        """Write an answer; raise LostBatch or OSError."""
        self.check()
        with open(self._path(self._owner, FILE_NAMES[ok]), "ab", opener=private) as out:
            out.write(line)
        self.done.add(custom_id)

    def publish(self, files: FileStore, *, ok: bool) -> str | None:
        """Store the answers as a file, unless that was done, and return its id; None without answers."""
        self.check()
        parts = [(self._path(owner, FILE_NAMES[ok]), size) for owner, size in self._earlier[FILE_NAMES[ok]] if size]
        own = self._path(self._owner, FILE_NAMES[ok])
        if own.exists():
            parts.append((own, own.stat().st_size))
        if not parts:
            return None
        with Joined(parts) as content:
            name, file_id = self.batch.file_name(ok=ok), self.batch.file_id(ok=ok)
            return files.add(content, name, "batch_output", file_id).id

    def clear(self) -> None:
        """Delete the answers of all holders."""
        for owner in (*self._folder.owners(self.batch.id), 0):
            for name in FILE_NAMES.values():
                self._path(owner, name).unlink(missing_ok=True)

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()

    def _path(self, owner: int, name: str) -> Path:
        return self._folder.folder(self.batch.id, owner) / name


def hold(folder: BatchFolder, batch_id: str, *, locks: bool) -> HeldFolder | None:
    """Hold a batch under the next number; None if another process holds it, or if it has ended.

    locks: also take a file lock; None if another process has it. Raises NotFound or OSError."""
    batch, *_ = folder.saved(batch_id)
    if batch.status in ENDED:
        return None
    lock = folder.lock(batch_id) if locks else None
    if locks and lock is None:
        return None
    try:
        batch, previous, earlier = folder.saved(batch_id)  # it may have ended in the meantime
        owner = max((*folder.owners(batch_id), 0)) + 1
        try:
            folder.folder(batch_id, owner).mkdir(mode=0o700)
        except FileExistsError:
            owner = 0  # another process took this number first
        if not owner or batch.status in ENDED:
            return None
        held = HeldFolder(folder, batch, owner, lock)
        try:
            held.take(previous, earlier)
        except OSError:
            shutil.rmtree(folder.folder(batch_id, owner), ignore_errors=True)
            raise
        lock = None
        return held
    finally:
        if lock is not None:
            lock.close()


class Joined:
    """Readable concatenation of the first bytes of several files."""

    def __init__(self, parts: list[tuple[Path, int]]) -> None:
        self._parts, self._remaining = iter(parts), 0
        self._file: IO[bytes] | None = None

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes; none at the end."""
        while not self._remaining:
            self.__exit__()
            path, self._remaining = next(self._parts, (None, 0))
            if path is None:
                return b""
            self._file = path.open("rb")
        assert self._file is not None
        piece = self._file.read(min(size, self._remaining))
        self._remaining -= len(piece)
        if not piece:
            raise OSError("answers are missing")
        return piece

    def __enter__(self) -> Joined:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def complete_bytes(path: Path) -> int:
    """Return the bytes of the answers in a file, up to the first truncated line."""
    return sum(size for _, size in _lines(path))


def ids_of(path: Path, size: int) -> Iterator[str]:
    """Yield the ids of the answers in the first bytes of a file."""
    for custom_id, length in _lines(path):
        size -= length
        if size < 0:
            return
        yield custom_id


def _lines(path: Path) -> Iterator[tuple[str, int]]:
    """Yield id and bytes of each answer in a file, up to the first truncated line."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            try:
                custom_id = str(json.loads(line)["custom_id"])
            except (ValueError, KeyError, TypeError):
                return
            if not line.endswith(b"\n"):
                return
            yield custom_id, len(line)

"""FileStore: a tenant's uploaded files and batch outputs on disk, within a limit of bytes.

All functions block: call them outside the event loop."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from kvferry.protocol.errors import InvalidRequest, KvferryError, NotFound, RequestTooLarge, reason
from kvferry.runtime.private_files import make_private_folder, private, write_whole

log = logging.getLogger(__name__)
PURPOSES = ("batch", "batch_output")
"""Purposes of files: batch inputs and outputs."""
MAX_FILES = 10_000
"""Maximum number of files per tenant."""
_ID = re.compile(r"file-[0-9a-f]{32}")


class Readable(Protocol):
    """Content that is read in pieces."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; none at the end."""


class DiskFailed(KvferryError):
    """The data directory cannot be read or written."""

    code, retryable = "storage_failed", False


class DiskFull(DiskFailed):
    """The disk is full, independent of the tenant's limit."""

    status, code = 507, "insufficient_storage"


def disk_failed(what: str, error: OSError) -> DiskFailed:
    """Log a disk error and return the API's error, without the path; `what` names the failed operation."""
    kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else DiskFailed
    log.warning("%s: %s; --data-dir says where", what, error)
    return kind(f"{what}: {error.strerror or reason(error)}")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """File as the API shows it; times are in seconds since 1970."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None

    def shown(self) -> dict[str, object]:
        """Return the file as the API shows it."""
        return {"object": "file", **asdict(self), "status": "processed", "status_details": None}

    def record(self) -> str:
        """Return the file's description as JSON, as it is stored."""
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})


def read_file(record: str | bytes) -> StoredFile | None:
    """Return the file of a record; None if it can't be read."""
    try:
        return StoredFile(**json.loads(record))
    except (ValueError, TypeError):
        return None


class FileStore:
    """Files of one tenant below `root`, at most `limit` bytes in total.

    Safe for several threads and processes: a file exists completely or not at all."""

    def __init__(self, root: Path, tenant: str, limit: int) -> None:
        self.folder = root / tenant_folder(tenant) / "files"
        self._limit = limit

    def add(self, content: Readable, filename: str, purpose: str, file_id: str = "") -> StoredFile:
        """Store the rest of `content` as a file; return the file with this id if it exists already.

        Raises RequestTooLarge if the tenant's limit is exceeded, and DiskFailed; both leave no file behind."""
        own = uuid.uuid4().hex
        file_id = file_id or f"file-{own}"
        try:
            make_private_folder(self.folder)
            partial_path = self.folder / f"file-{own}.part"
            try:
                with open(partial_path, "wb", opener=private) as out:
                    shutil.copyfileobj(cast("BinaryIO", content), out, 2**20)
                with self._locked():
                    if known := self._read(self._description(file_id)):
                        return known
                    size = partial_path.stat().st_size
                    self._check_limit(size)
                    stored = StoredFile(file_id, size, int(time.time()), filename[:255], purpose)
                    partial_path.rename(self._content(file_id))
                    try:
                        write_whole(self._description(file_id), stored.record())
                    except OSError:
                        self._content(file_id).unlink(missing_ok=True)
                        raise
                return stored
            finally:
                partial_path.unlink(missing_ok=True)
        except OSError as error:
            raise disk_failed("the file cannot be stored", error) from error

    def all(self) -> list[StoredFile]:
        """Return all files, newest first."""
        found = [file for path in self.folder.glob("file-*.json") if (file := self._read(path)) is not None]
        return sorted(found, key=lambda file: (file.created_at, file.id), reverse=True)

    def get(self, file_id: str, param: str = "file_id") -> StoredFile:
        """Return a file's description; raise NotFound."""
        check_file_id(file_id, param)
        stored = self._read(self._description(file_id))
        if stored is None:
            raise no_file(file_id, param)
        return stored

    def path(self, file_id: str, param: str = "file_id") -> Path:
        """Return the path of a file's content; raise NotFound."""
        return self._content(self.get(file_id, param).id)

    def open(self, file_id: str) -> tuple[BinaryIO, int]:
        """Open a file and return it with its size in bytes; raise NotFound. It stays readable if deleted meanwhile."""
        try:
            content = self.path(file_id).open("rb")
        except FileNotFoundError:
            raise no_file(file_id) from None
        return content, os.fstat(content.fileno()).st_size

    def delete(self, file_id: str) -> None:
        """Delete a file; raise NotFound."""
        self.get(file_id)
        self._description(file_id).unlink(missing_ok=True)
        self._content(file_id).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the folder against other threads and processes."""
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def remaining(self) -> int:
        """Return the remaining bytes of the tenant's limit."""
        return max(0, self._remaining(self.all()))

    def _remaining(self, known: Iterable[StoredFile]) -> int:
        return self._limit - sum(file.bytes for file in known)

    def _check_limit(self, size: int) -> None:
        known = self.all()
        remaining = self._remaining(known)
        if size > remaining:
            raise too_large(size, remaining, self._limit)
        if len(known) >= MAX_FILES:
            raise too_many(len(known))

    def _content(self, file_id: str) -> Path:
        return self.folder / f"{file_id}.data"

    def _description(self, file_id: str) -> Path:
        return self.folder / f"{file_id}.json"

    def _read(self, path: Path) -> StoredFile | None:
        try:
            return read_file(path.read_bytes())
        except OSError:
            return None


def check_purpose(purpose: str) -> None:
    """Raise InvalidRequest unless clients may upload files of this purpose; outputs are created here."""
    if purpose != "batch":
        raise InvalidRequest(f"purpose: {purpose!r} is not supported by this server, only 'batch'", param="purpose")


def check_file_id(file_id: str, param: str = "file_id") -> None:
    """Raise NotFound unless this can be the id of a file."""
    if not _ID.fullmatch(file_id):
        raise no_file(file_id, param)


def no_file(file_id: str, param: str = "file_id") -> NotFound:
    """Return the API's error for an unknown file."""
    return NotFound(f"there is no file {file_id!r}", param=param)


def too_large(size: int, remaining: int, limit: int) -> RequestTooLarge:
    """Return the API's error for a file that exceeds its tenant's remaining bytes."""
    left = max(remaining, 0)
    message = f"file: its {size} bytes do not fit into the {left} left of {limit}; delete files that are not needed"
    return RequestTooLarge(message, param="file")


def too_many(known: int) -> RequestTooLarge:
    """Return the API's error for one more file than a tenant may have."""
    message = f"file: {known} files are stored, the limit is {MAX_FILES}; delete files that are not needed"
    return RequestTooLarge(message, param="file")


def tenant_folder(tenant: str) -> str:
    """Return a safe folder name for any tenant name."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:16] if tenant else "default"


def tenant_folders(root: Path) -> Iterator[Path]:
    """Iterate over the folders of all tenants, sorted by name."""
    return (path for path in sorted(root.glob("*")) if path.is_dir())

"""Directories of disk tiers under one path, one per process and fingerprint: locking, and removal of abandoned ones.

A directory belongs to one process at a time and is private to its owner."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from kvferry.kv_transfer.tiers.files import SUFFIX, UNFINISHED
from kvferry.protocol.errors import ConfigError, reason

log = logging.getLogger("kvferry.tiers")

MAX_DIRECTORIES = 256
"""Maximum number of directories tried under one path."""
LOCK = "lock"
ABANDONED_S = 7 * 86_400.0
"""Seconds without use after which a directory of another fingerprint is removed: its model or format is obsolete."""


def take(path: str, name: str, fingerprint: str) -> tuple[Path, IO[bytes]]:
    """Return the first free directory of this fingerprint under the path, and its lock file, which must stay open.

    A restarted process finds its directory again. Raises ConfigError."""
    base = Path(path).expanduser()
    kind = base / hashlib.sha256(fingerprint.encode()).hexdigest()[:16]
    directory = kind
    try:
        base.mkdir(parents=True, exist_ok=True)
        _make_private(kind, base)
        for directory in (kind / f"{name}-{number}" for number in range(MAX_DIRECTORIES)):
            _make_private(directory, base)
            if (lock := _own(directory)) is not None:
                _sweep(base, kind)
                return directory, lock
    except OSError as error:
        raise ConfigError(f"cannot keep blocks in {directory}: {reason(error)}", param="kv_disk_path") from error
    raise ConfigError(f"{MAX_DIRECTORIES} processes already keep blocks under {path}", param="kv_disk_path")


def _make_private(directory: Path, base: Path) -> None:
    """Create a private directory. Raises OSError if it belongs to another user.

    Anyone who can write into it can change what the model computes. The owner of `base` is trusted with all its
    directories."""
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (os.geteuid(), base.stat().st_uid):
        raise PermissionError(f"{directory} belongs to another user, or is a symbolic link")
    if status.st_mode & 0o077 and status.st_uid == os.geteuid():
        directory.chmod(0o700)


def _own(directory: Path) -> IO[bytes] | None:
    """Lock the directory; return None if another process uses or removes it. Raises OSError."""
    file = os.fdopen(os.open(directory / LOCK, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), "wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink:
            os.utime(file.fileno())
            return file
    except BlockingIOError:
        pass
    except OSError:
        file.close()
        raise
    file.close()
    return None


def _sweep(base: Path, kind: Path) -> None:
    """Remove abandoned directories of other fingerprints. Errors are only logged: they only cost disk space."""
    for directory in _abandoned(base, kind):
        try:
            if (lock := _own(directory)) is not None:
                with lock:
                    for path in directory.iterdir():
                        if path.suffix in (SUFFIX, UNFINISHED) or path.name == LOCK:
                            path.unlink()
                    directory.rmdir()
                log.info("removed %s: unused for days", directory)
            with_others = any(directory.parent.iterdir())
            if not with_others:
                directory.parent.rmdir()
        except OSError as error:
            log.warning("cannot remove %s: %s", directory, reason(error))


def _abandoned(base: Path, kind: Path) -> Iterator[Path]:
    """Yield directories of other fingerprints, as `take` makes them, that were not used for LEFT_S."""
    for lock in sorted(base.glob(f"{'[0-9a-f]' * 16}/*-*/{LOCK}")):
        directory = lock.parent
        try:
            used = max(lock.lstat().st_mtime, directory.lstat().st_mtime)
        except OSError:
            continue
        if directory.parent != kind and time.time() - used > ABANDONED_S:
            yield directory

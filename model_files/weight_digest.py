"""Digest of whole weight files, at the speed of memory, computed once for each version of a file.

A digest is kept in the user's cache folder under the file's device, inode, size and times, so that a restart reads
nothing. The change time is among them, which no unprivileged process can set."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_CHUNK_BYTES = 1 << 22
_SMALL_BYTES = 1 << 20
"""Files up to this size are read each time, in bytes: that is faster than looking up their digest."""


def weights_digest(files: Iterable[Path]) -> bytes:
    """Return a digest of the files' sizes and all of their bytes, in this order. Raises OSError."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"\0{file.stat().st_size}\0".encode() + file_digest(file).encode())
    return digest.digest()


def file_digest(path: Path) -> str:
    """Return the XXH3 digest of a file as 32 hex digits, from the cache where it has one.

    Raises OSError, also for a pipe or a device, whose reader would wait or never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, f"{path.name} is not a regular file")
    kept = kept_digest(path)
    if kept is not None:
        with suppress(OSError):
            found = kept.read_text()
            if len(found) == 32:
                return found
    digest = _read(path)
    if kept is not None and kept_digest(path) == kept:
        with suppress(OSError):
            _keep(kept, digest)
    return digest


def kept_digest(path: Path) -> Path | None:
    """Return the file that keeps this version's digest; None if there is no safe place, or the file is small."""
    state = path.stat()
    if state.st_size <= _SMALL_BYTES:
        return None
    version = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvferry" / "digests"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.stat()
    except (OSError, RuntimeError):
        return None
    safe = owner.st_uid == os.geteuid() and not owner.st_mode & 0o022
    return folder / "-".join(f"{number:x}" for number in version) if safe else None


def _read(path: Path) -> str:
    import xxhash  # a router has no weights to read, and need not have it

    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        chunk = memoryview(bytearray(min(max(size, 1), _CHUNK_BYTES)))
        while read := file.readinto(chunk):
            digest.update(chunk[:read])
    return digest.hexdigest()


def _keep(kept: Path, digest: str) -> None:
    descriptor, name = tempfile.mkstemp(dir=kept.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(digest)
    os.replace(name, kept)

"""Files and folders for clients' data, created so that only this process's user can read them."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path


def private(path: str, flags: int) -> int:
    """Open a file, created with access for its owner only. For `opener` of `open`. Raises OSError."""
    return os.open(path, flags, 0o600)


def make_private_folder(folder: Path) -> None:
    """Create a folder and its missing parents, with access for their owner only. Raises OSError."""
    for each in reversed([folder, *folder.parents]):
        with contextlib.suppress(FileExistsError):
            if not each.exists():
                each.mkdir(mode=0o700)


def make_private(root: Path) -> None:
    """Remove other users' rights from a folder and its content, as far as this user owns them. Never raises OSError."""
    for folder, _, files in os.walk(root):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            with contextlib.suppress(OSError):
                state = os.lstat(path)
                if state.st_mode & 0o077 and state.st_uid == os.geteuid() and not os.path.islink(path):
                    os.chmod(path, state.st_mode & 0o700)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: readers see the old content or the new one. After an OSError nothing is left behind."""
    partly = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with open(partly, "wb", opener=private) as out:
            out.write(content.encode() if isinstance(content, str) else content)
            out.flush()
            os.fsync(out.fileno())
        partly.replace(path)
    finally:
        partly.unlink(missing_ok=True)

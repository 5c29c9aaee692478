"""Files and folders with clients' data, which only this process's user can read."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def private(path: str, flags: int) -> int:
    """Open a file, created for its owner alone: the `opener` of `open`. Raises OSError."""
    return os.open(path, flags, 0o600)


def make_private_folder(folder: Path) -> None:
    """Create a folder and its missing parents for their owner alone. Raises OSError."""
    for each in reversed([folder, *folder.parents]):
        with contextlib.suppress(FileExistsError):
            if not each.exists():
                each.mkdir(mode=0o700)


def make_private(root: Path) -> None:
    """Take others' rights from a folder and all below it, as far as they are this user's. Raises no OSError."""
    for folder, _, files in os.walk(root):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            with contextlib.suppress(OSError):
                state = os.lstat(path)
                if state.st_mode & 0o077 and state.st_uid == os.geteuid() and not os.path.islink(path):
                    os.chmod(path, state.st_mode & 0o700)

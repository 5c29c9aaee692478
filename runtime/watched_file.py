"""Settings file that is reloaded whenever it changes, such as a mounted Secret."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Generic, TypeVar

from kvferry.protocol.errors import ConfigError, reason
from kvferry.runtime.background import background

T = TypeVar("T")
log = logging.getLogger(__name__)

POLL_S = 1.0
"""Interval between checks of a file, in seconds."""
MAX_BYTES = 16 * 2**20
"""Maximum size of a file, in bytes."""

Stamp = tuple[int, int, int]
"""State of a file: inode, size in bytes, modification time in nanoseconds."""


class WatchedFile(Generic[T]):
    """File whose content is parsed into `value` and parsed again when the file changes.

    The constructor raises ConfigError, which names the setting, if the file cannot be read or parsed. Later failures
    are logged, and the last good value stays.

    setting   name of the setting that holds the path
    read      parses the text; raises ConfigError, whose message need not name the file
    taken     called with each new value except the first
    """

    def __init__(
        self, path: str, setting: str, read: Callable[[str], T], taken: Callable[[T], None] = lambda value: None
    ) -> None:
        self._path, self._flag = Path(path).expanduser(), f"--{setting.replace('_', '-')}"
        self._read, self._taken = read, taken
        try:
            found = self._read_changed(None)
        except (OSError, ConfigError) as error:
            raise ConfigError(f"{self._flag} {path}: {_message(error)}", param=setting) from error
        assert found
        self._stamp, self.value = found

    def followed(self) -> AbstractAsyncContextManager[None]:
        """Reload the file whenever it changes, during the `with` block."""
        return background(self.follow(), f"follow {self._flag}")

    async def follow(self) -> None:
        """Reload the file whenever it changes, until cancelled."""
        reported = ""
        while True:
            await asyncio.sleep(POLL_S)
            failure = await self.refresh()
            if failure and failure != reported:
                log.error("%s %s: %s; keeping its previous content", self._flag, self._path, failure)
            reported = failure

    async def refresh(self) -> str:
        """Reload the file if it has changed. Returns the reason of a failure; empty on success."""
        try:
            found = await asyncio.to_thread(self._read_changed, self._stamp)
        except (OSError, ConfigError) as error:
            return _message(error)
        if found:
            self._stamp, self.value = found
            self._taken(self.value)
            log.info("%s %s has changed and was reloaded", self._flag, self._path)
        return ""

    def _read_changed(self, known: Stamp | None) -> tuple[Stamp, T] | None:
        """Return the file's state and parsed value; None if its state is `known`. Raises OSError, ConfigError."""
        with self._path.open("rb") as file:
            stat = os.fstat(file.fileno())
            stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if stamp == known:
                return None
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"longer than {MAX_BYTES} bytes")
        try:
            return stamp, self._read(data.decode())
        except UnicodeDecodeError:
            raise ConfigError("not UTF-8") from None


def _message(error: Exception) -> str:
    return error.message if isinstance(error, ConfigError) else reason(error)

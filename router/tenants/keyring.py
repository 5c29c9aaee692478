"""The keys that a router knows now: the one of its settings, and those of a file that is read again when it changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from protocol.errors import ConfigError, reason
from protocol.settings import RouterSettings
from router.tenants.keys import Keys, key_hash, read_keys
from router.tenants.tenant import NOBODY, Tenant

log = logging.getLogger(__name__)

POLL_S = 1.0
MAX_BYTES = 16 * 2**20
"""Of a file of keys: a hundred thousand tenants."""

Stamp = tuple[int, int, int]
"""Of a file's state: its inode, its size, when it was written."""


class Keyring:
    """Keys are looked up by their hash: how long that takes says nothing that leads to a key. `guards` is whether
    clients need one; `tenants` are the live ones by name, NOBODY among them where it has a key. Raises ConfigError when
    the file cannot be read at first; a file that breaks later is logged, and what it said before holds."""

    def __init__(self, settings: RouterSettings) -> None:
        self._path = Path(settings.api_keys) if settings.api_keys else None
        self._own = {key_hash(settings.api_key.encode()): NOBODY} if settings.api_key else {}
        self._stamp: Stamp | None = None
        self._keys: Keys = {}
        self.guards = bool(self._own or self._path)
        self.tenants: dict[str, Tenant] = {}
        if self._path is None:
            self._take({})
            return
        try:
            self._stamp, keys = _read(self._path)
        except (OSError, ConfigError) as error:
            raise ConfigError(f"--api-keys {self._path}: {_told(error)}", param="api_keys") from error
        self._take(keys)

    def tenant(self, key: bytes) -> Tenant | None:
        """Whose key it is; None if nobody's."""
        digest = key_hash(key)
        return self._own.get(digest) or self._keys.get(digest)

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """Keep up with the file until the end of the block."""
        task = asyncio.create_task(self._follow(), name="api-keys") if self._path else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _follow(self) -> None:
        told: str = ""
        while True:
            await asyncio.sleep(POLL_S)
            said = await self.refresh()
            if said and said != told:
                log.error("--api-keys %s: %s; the keys stay as they were", self._path, said)
            told = said

    async def refresh(self) -> str:
        """Read the file if it has changed. Returns why that cannot be done; empty when all is well."""
        assert self._path
        try:
            stamp, keys = await asyncio.to_thread(_read, self._path, self._stamp)
        except (OSError, ConfigError) as error:
            return _told(error)
        if stamp != self._stamp:
            self._stamp = stamp
            self._take(keys)
            log.info("%d keys of %d tenants read from %s", len(keys), len(set(keys.values())), self._path)
        return ""

    def _take(self, keys: Keys) -> None:
        self._keys = keys
        everyone = [*keys.values(), *self._own.values()] if self.guards else [NOBODY]
        self.tenants = {tenant.name: tenant for tenant in everyone}


def _told(error: Exception) -> str:
    return error.message if isinstance(error, ConfigError) else reason(error)


def _read(path: Path, known: Stamp | None = None) -> tuple[Stamp, Keys]:
    """The file's state and its keys, which are not read again from a state that is known. Raises OSError, ConfigError
    (whose message does not name the file)."""
    with path.open("rb") as file:
        stat = path.stat()
        stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if stamp == known:
            return stamp, {}
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ConfigError(f"longer than {MAX_BYTES} bytes")
    try:
        return stamp, read_keys(data.decode())
    except UnicodeDecodeError:
        raise ConfigError("not UTF-8") from None

"""Client of the object store that nodes share: S3, Google, Azure or a directory, through the library obstore.

obstore finds credentials as the cloud providers' own tools do."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

from kvferry.protocol.errors import ConfigError, NotFound, reason

SCHEMES = ("s3", "gs", "az", "file")
CALL_S = 30.0
"""Maximum time of one call in seconds, including its retries."""
TRIES = 2
"""Number of retries of one call."""
PAGE = 1000
"""Maximum number of objects listed or deleted in one call."""


class Objects:
    """Objects under one URL. The methods are awaited on one asyncio loop.

    They raise obstore's errors, TimeoutError, and NotFound for a missing object."""

    def __init__(self, url: str) -> None:
        """Open the store without a call to it. Raises ConfigError."""
        scheme, found, _ = url.partition("://")
        if not found or scheme not in SCHEMES:
            raise ConfigError(
                f"{url} is not one of {', '.join(f'{each}://' for each in SCHEMES)}", param="kv_remote_url"
            )
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise ConfigError("it needs obstore: pip install 'kvferry[objects]'", param="kv_remote_url") from error
        self.url, self._calls = url, obstore
        try:
            self._store = from_url(url, **_options(url))
        except Exception as error:
            raise ConfigError(f"{url} cannot be used: {reason(error)}", param="kv_remote_url") from error

    async def age(self, name: str) -> float:
        """Return the seconds since the object was written. Raises NotFound.

        Compares this machine's clock with the store's."""
        try:
            found = await self._calls.head_async(self._store, name)
        except FileNotFoundError as error:
            raise NotFound(f"{name} does not exist") from error
        return time.time() - float(found["last_modified"].timestamp())

    async def since(self, name: str) -> float:
        """Return the object's `age`; infinite if it does not exist."""
        try:
            return await self.age(name)
        except NotFound:
            return math.inf

    async def get(self, name: str) -> memoryview:
        """Return the object's content. Raises NotFound."""
        try:
            found = await self._calls.get_async(self._store, name)
            return memoryview(await found.bytes_async())
        except FileNotFoundError as error:
            raise NotFound(f"{name} no longer exists") from error

    async def put(self, name: str, content: bytes) -> None:
        """Write an object, which becomes visible only when it is complete."""
        await self._calls.put_async(self._store, name, content)

    async def delete(self, names: Iterable[str]) -> None:
        """Delete objects; missing ones count as deleted."""
        wanted = list(names)
        for at in range(0, len(wanted), PAGE):
            try:
                await self._calls.delete_async(self._store, wanted[at : at + PAGE])
            except FileNotFoundError:
                for name in wanted[at : at + PAGE]:
                    await self._delete_one(name)

    async def list(self, folder: str) -> list[tuple[str, float, int]]:
        """Return (name, time of writing, bytes) of all objects in the folder."""
        found: list[tuple[str, float, int]] = []
        async for page in self._calls.list(self._store, folder, chunk_size=PAGE):
            found += [(each["path"], each["last_modified"].timestamp(), each["size"]) for each in page]
        return found

    async def tried(self) -> float:
        """Write, find, read and delete a small object; return the time that it took, in seconds.

        Raises OSError if the store does not return what was written."""
        name, content, began = f"tried-{uuid4().hex}", b"kvferry", time.monotonic()
        async with asyncio.timeout(CALL_S):
            await self.put(name, content)
            await self.age(name)
            found = await self.get(name)
            listed = [each for each, _, _ in await self.list("")]
            await self.delete([name])
        if found != content or name not in listed:
            raise OSError("an object read back differs from what was written")
        return time.monotonic() - began

    async def _delete_one(self, name: str) -> None:
        with suppress(FileNotFoundError):
            await self._calls.delete_async(self._store, name)


def _options(url: str) -> dict[str, Any]:
    if url.startswith("file:"):
        return {"mkdir": True}
    return {
        "client_options": {"allow_http": True, "connect_timeout": "3s", "timeout": f"{CALL_S:.0f}s"},
        "retry_config": {"max_retries": TRIES, "retry_timeout": timedelta(seconds=CALL_S)},
    }

"""Eviction from the shared object store: a periodic sweep on one node at a time deletes the oldest objects."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence

from kvferry.kv_transfer.tiers.object_groups import SUFFIX, depth_of
from kvferry.kv_transfer.tiers.objects import Objects
from kvferry.protocol.errors import NotFound, reason

log = logging.getLogger("kvferry.tiers")

EVERY_S = 600.0
"""Time between two sweeps by any nodes, in seconds."""
AGE_S = 3600.0
"""Interval, in seconds, whose objects count as equally old; among them, the ends of chains are deleted first."""
ROOM = 0.9
"""Share of the size bound that remains after a sweep."""
MARK = "swept"


async def keep_below(
    objects: Objects, folder: str, size: int, deleted: Callable[[Sequence[str]], None] = lambda names: None
) -> None:
    """Keep the folder below `size` bytes by periodic sweeps, until cancelled.

    deleted: called with the names of deleted objects."""
    while True:
        try:
            await asyncio.sleep(EVERY_S * random.uniform(0.5, 1.5))
            if await _turn(objects, folder):
                deleted(await sweep(objects, folder, size))
        except Exception as error:
            log.warning("cannot keep %s below %.1f GiB: %s", objects.url, size / 2**30, reason(error))


async def sweep(objects: Objects, folder: str, size: int) -> list[str]:
    """Delete the objects beyond the size bound; return their names."""
    listed = [row for row in await objects.list(folder) if row[0].endswith(SUFFIX)]
    gone = list(excess(listed, size))
    await objects.delete(gone)
    if gone:
        log.info(
            "deleted %d of %d objects of %s: they exceeded %.1f GiB",
            len(gone),
            len(listed),
            objects.url,
            size / 2**30,
        )
    return gone


def excess(listed: Iterable[tuple[str, float, int]], size: int) -> Iterable[str]:
    """Yield the names of objects to delete so that the rest fits into `size` bytes.

    listed: (name, time of writing, bytes) of each object."""
    rows = sorted(listed, key=lambda row: (row[1] // AGE_S, -depth_of(row[0]), row[1]))
    used = sum(each for _, _, each in rows)
    if used <= size:
        return
    for name, _, each in rows:
        if used <= size * ROOM:
            return
        used -= each
        yield name


async def _turn(objects: Objects, folder: str) -> bool:
    """Return True, and claim the turn, if no node has swept recently."""
    mark = f"{folder}/{MARK}"
    try:
        if await objects.age(mark) < EVERY_S / 2:
            return False
    except NotFound:
        pass
    await objects.put(mark, b"swept")
    return True

"""Eviction from the shared object store: one node at a time deletes the oldest objects."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence

from kvferry.kv_transfer.tiers.groups import SUFFIX, depth_of
from kvferry.kv_transfer.tiers.objects import Objects
from kvferry.protocol.errors import NotFound, reason

log = logging.getLogger("kvferry.tiers")

EVERY_S = 600.0
"""Between two sweeps, whichever node makes them."""
AGE_S = 3600.0
"""What was written within so long of each other counts as of one age: of a chain its end leaves first."""
ROOM = 0.9
"""What a sweep leaves of the bound."""
MARK = "swept"


async def keep_below(
    objects: Objects, folder: str, size: int, deleted: Callable[[Sequence[str]], None] = lambda names: None
) -> None:
    """Run the eviction for ever.

    deleted: receives the names of deleted objects. deleted: told the names of what is not there any more."""
    while True:
        try:
            await asyncio.sleep(EVERY_S * random.uniform(0.5, 1.5))
            if await _turn(objects, folder):
                deleted(await sweep(objects, folder, size))
        except Exception as error:
            log.warning("%s is not kept below %.1f GiB now: %s", objects.url, size / 2**30, reason(error))


async def sweep(objects: Objects, folder: str, size: int) -> list[str]:
    """Delete what is too much; its names."""
    listed = [row for row in await objects.list(folder) if row[0].endswith(SUFFIX)]
    gone = list(too_much(listed, size))
    await objects.delete(gone)
    if gone:
        log.info(
            "%d of %d objects of %s are deleted: they were over %.1f GiB",
            len(gone),
            len(listed),
            objects.url,
            size / 2**30,
        )
    return gone


def too_much(listed: Iterable[tuple[str, float, int]], size: int) -> Iterable[str]:
    """Names, of (name, when it was written, bytes), without which the rest has room."""
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
    """Return whether no node has swept of late; now this one does."""
    mark = f"{folder}/{MARK}"
    try:
        if await objects.age(mark) < EVERY_S / 2:
            return False
    except NotFound:
        pass
    await objects.put(mark, b"swept")
    return True

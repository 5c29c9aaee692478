"""Checksums that are told later, as those of a GPU's blocks are, but in an order that tests decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvferry.kv_transfer.checksum import checksum


class LaterChecksums:
    """Implements kv_transfer.checksum.Checksums; `submit` is the link's."""

    def __init__(self, submit: Callable[[Callable[[], None]], None]):
        self._submit = submit

    def take(self, buffer: Any, done: Callable[[int], None]) -> int | None:
        self._submit(lambda: done(checksum(buffer)))
        return None

"""Count of closed connections that UCX fails to release; too many, or memory still written to, stop the link."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)
MAX_ABANDONED = 32
"""Maximum number of abandoned connections; beyond it the link stops."""
WRITTEN_HERE = frozenset({"tcp", "posix", "sysv", "self"})
"""Transports over which only the receiving process writes into its memory, and only during UCX calls for the worker."""


class MemoryNotQuiet(Exception):
    """Raised if too many connections are abandoned, or their memory may still be written; the link must stop."""


class AbandonedConnections:
    """Count of closed connections that UCX did not release.

    If the receiving process itself does the writing, the memory of a connection is quiet once UCX is not called for it
    any more, even if UCX still holds operations. Such a connection leaks 8 descriptors and some MiB; MAX_ABANDONED of
    them are tolerated. If a device or another process may write, the memory must never be used again, and it is unknown
    which memory that is, so the process has to be replaced. transports: in the syntax of UCX_TLS."""

    def __init__(self, transports: str):
        self._written_here = set(transports.split(",")) <= WRITTEN_HERE
        self.count = 0

    def add(self) -> None:
        """Count one more abandoned connection."""
        self.count += 1
        log.warning("UCX does not release a closed connection, abandoning it (%d in total)", self.count)

    def check(self) -> None:
        """Raise MemoryNotQuiet if the memory of closed connections may not be reported as quiet."""
        if self.count and not self._written_here:
            raise MemoryNotQuiet("UCX does not release a closed connection; a device may still write to its memory")
        if self.count > MAX_ABANDONED:
            raise MemoryNotQuiet(f"UCX did not release {self.count} closed connections")

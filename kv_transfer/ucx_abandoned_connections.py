"""Closed connections that UCX fails to release: their count, and the check that their memory is no longer written."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)
MOST_LEFT = 32
"""Abandoned connections that are kept at most."""
WRITTEN_HERE = frozenset({"tcp", "posix", "sysv", "self"})
"""Transports over which anyone who receives writes into its memory itself, and only while it calls UCX for the
worker."""


class MemoryNotQuiet(Exception):
    """The link cannot go on."""


class AbandonedConnections:
    """Counts them.

    Where the receiving process writes itself, the memory of a connection that UCX is not called for any more is quiet,
    whatever UCX still has in its books. It costs 8 descriptors and some MiB: MOST_LEFT are put up with. Where a device
    or another process may write, no memory of such a connection may ever be used again, nor is it known which that is:
    the process has to be replaced. transports: as UCX_TLS has them."""

    def __init__(self, transports: str):
        self._written_here = set(transports.split(",")) <= WRITTEN_HERE
        self.count = 0

    def add(self) -> None:
        """One more."""
        self.count += 1
        log.warning("UCX does not let go of a closed connection, which was left behind (so far: %d)", self.count)

    def check(self) -> None:
        """Raises MemoryNotQuiet: nothing more may be told of what was closed."""
        if self.count and not self._written_here:
            raise MemoryNotQuiet("UCX does not let go of a closed connection; a device may still write to its memory")
        if self.count > MOST_LEFT:
            raise MemoryNotQuiet(f"UCX did not let go of {self.count} closed connections")

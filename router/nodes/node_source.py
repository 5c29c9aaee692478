"""NodeSource: where a router reads its nodes; LastNodes: those nodes in a file, for a start while Redis is away."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from kvferry.cluster_state.seal import NO_SEAL, Seal
from kvferry.protocol.errors import reason
from kvferry.protocol.lease import IncompatibleLease, NodeLease
from kvferry.protocol.wire import WireError, pack, unpack
from kvferry.runtime.private_files import make_private_folder, write_whole

log = logging.getLogger(__name__)

NAME = "nodes"
"""Name of the file, and of its record for the seal."""
SAVE_S = 10.0
"""Time after which unchanged nodes are saved again, in seconds."""
MAX_AGE_S = 300.0
"""Age from which saved nodes are ignored, in seconds: their addresses may belong to others."""
CLOSE_S, CHECK_S = 1.0, 0.01
"""Longest time that `close` waits for a running save, and its time between two checks, in seconds."""


class NodeSource(Protocol):
    """Part of the node registry that the router uses; `incompatible` holds nodes that cannot be used."""

    incompatible: tuple[IncompatibleLease, ...]

    async def nodes(self) -> list[NodeLease]:
        """Return every node with a live lease; raise if the registry is unreachable."""


class LastNodes:
    """The cluster's last known nodes in a file.

    A router that starts while Redis is away connects to them, and serves with those that accept: nodes refuse a
    router that asks for another epoch of theirs or has another secret. Errors of the disk are logged and ignored.

    A save runs in a thread of its own, which ends with the process: a disk that hangs delays nothing else.

    folder: of the file. seal: signs it. clock: monotonic seconds. writes: false where another process of this router
    saves the nodes."""

    def __init__(
        self, folder: Path, seal: Seal = NO_SEAL, clock: Callable[[], float] = time.monotonic, *, writes: bool = True
    ) -> None:
        self._path, self._seal, self._clock, self._writes = folder / NAME, seal, clock, writes
        self._saved, self._save_at = frozenset[tuple[str, int, str]](), 0.0
        self._saving: threading.Thread | None = None
        self._is_failing = False

    async def load(self) -> list[NodeLease]:
        """Return the saved nodes; none if they are missing, too old or not written by this cluster."""
        return await asyncio.to_thread(self._read)

    def save(self, leases: Sequence[NodeLease]) -> None:
        """Save the nodes in the background if they changed or were saved SAVE_S ago; never replace them by none."""
        nodes = frozenset((lease.node_id, lease.epoch, lease.role) for lease in leases)
        is_due = nodes != self._saved or self._clock() >= self._save_at
        if not self._writes or not leases or not is_due:
            return
        if self._is_saving:
            if self._clock() >= self._save_at and not self._is_failing:
                log.warning("the last known nodes are not saved: the disk does not answer")
                self._is_failing = True
            return
        self._saved, self._save_at = nodes, self._clock() + SAVE_S
        self._saving = threading.Thread(target=self._write, args=(pack(list(leases)),), name="last-nodes", daemon=True)
        self._saving.start()

    async def close(self) -> None:
        """Wait until a running save has ended, at most CLOSE_S."""
        ends = time.monotonic() + CLOSE_S
        while self._is_saving and time.monotonic() < ends:  # noqa: ASYNC110 - a thread has no event for it
            await asyncio.sleep(CHECK_S)
        if self._is_saving:
            log.warning("the last known nodes are not saved: the disk does not answer")

    @property
    def _is_saving(self) -> bool:
        return self._saving is not None and self._saving.is_alive()

    def _read(self) -> list[NodeLease]:
        try:
            if not _is_recent(self._path):
                return []
            record = self._seal.unwrap(NAME, self._path.read_bytes())
            leases = unpack(record) if record is not None else None
        except FileNotFoundError:
            return []
        except (OSError, WireError) as error:
            log.warning("the last known nodes cannot be read from %s: %s", self._path, error)
            return []
        return [lease for lease in leases if isinstance(lease, NodeLease)] if isinstance(leases, list) else []

    def _write(self, record: bytes) -> None:
        try:
            make_private_folder(self._path.parent)
            write_whole(self._path, self._seal.wrap(NAME, record))
            for part in self._path.parent.glob(f"{NAME}.*.part"):  # of routers that were killed while they wrote
                if not _is_recent(part):
                    part.unlink(missing_ok=True)
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                log.warning("the last known nodes are not saved: %s", reason(error))
            self._is_failing = True


def _is_recent(path: Path) -> bool:
    """Return whether the file is younger than MAX_AGE_S and not of the future."""
    return 0 <= time.time() - path.stat().st_mtime < MAX_AGE_S

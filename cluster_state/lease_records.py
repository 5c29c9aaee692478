"""LeaseRecords: nodes' leases as they are written in Redis, which one process may read for another."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvferry.cluster_state.lease_seal import LeaseSeal
from kvferry.cluster_state.redis_client import Script, sensible
from kvferry.protocol.lease import IncompatibleLease, NodeLease
from kvferry.protocol.wire import WireError

log = logging.getLogger("kvferry.redis")


class LeaseRecords:
    """Records of one cluster's leases.

    script     returns all live leases; keys: its arguments
    announced  last record of this process's lease, whether or not the server took it; empty: none
    """

    def __init__(self, script: Script, keys: Sequence[str], seal: LeaseSeal) -> None:
        self.announced = b""
        self._script, self._keys, self._seal = script, list(keys), seal
        self._logged_unreadable = False

    async def fetch(self) -> list[bytes]:
        """Return all live leases, unread. Raises RegistryUnavailable."""
        answer = await self._script.run(self._keys, [])
        with sensible():
            return [bytes(packed) for packed in answer]

    def unsealed(self, records: Sequence[bytes]) -> list[NodeLease]:
        """Return the leases in records that another process fetched; those that must not be used are left out."""
        return self.read(records)[0]

    def read(self, records: Sequence[bytes]) -> tuple[list[NodeLease], tuple[IncompatibleLease, ...]]:
        """Return the leases, and those of another wire version or without the seal of this cluster."""
        leases: list[NodeLease] = []
        incompatible, unreadable = [], ""
        for packed in records:
            try:
                lease = self._seal.unsealed(packed)
            except WireError as error:
                unreadable = str(error)
                continue
            if isinstance(lease, NodeLease):
                leases.append(lease)
            else:
                incompatible.append(lease)
        if unreadable and not self._logged_unreadable:
            log.warning("ignoring a node whose lease cannot be read: %s", unreadable)
        self._logged_unreadable = bool(unreadable)
        return leases, tuple(incompatible)

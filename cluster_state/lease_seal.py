"""LeaseSeal: writes nodes' leases, sealed with the cluster secret if any, and refuses forged or replayed ones.

A seal covers the lease, its cluster and its time, which grows with each renewal. So a process that saw a later lease
detects the replay of an older one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from kvferry.cluster_state.seal import Seal
from kvferry.protocol.layout import WIRE_VERSION
from kvferry.protocol.lease import IncompatibleLease, NodeLease
from kvferry.protocol.wire import WireError, pack, unpack

UNSEALED = 4
"""Last wire version whose leases did not state it."""
STALE = 2
"""Number of lease durations after which a lease without renewal is not trusted, even if the registry still has it."""
FORGOTTEN = 12
"""Number of lease durations after which a node that was not seen again is forgotten."""
_UNVERIFIED = "has a lease that is not authenticated with this cluster's secret"
_REPEATED = "has an old lease that was written again"


class _Renewal(NamedTuple):
    """Latest renewal of a node's lease, and when it was first seen, in seconds of the monotonic clock."""

    epoch: int
    issued: int
    seen_s: float


class LeaseSeal:
    """Writes and reads the leases of one cluster.

    seal: without a key, leases are trusted as they are. lease_s: seconds after which a lease expires. clock: monotonic
    seconds."""

    def __init__(self, cluster: str, seal: Seal, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._seal, self._lease_s, self._clock = cluster, seal, lease_s, clock
        self._latest: dict[str, _Renewal] = {}

    def sealed(self, lease: NodeLease) -> bytes:
        """Return the lease as bytes for the registry.

        The version, name and role come first in every wire version."""
        fields = [WIRE_VERSION, lease.node_id, lease.role, pack(lease)]
        if not self._seal:
            return pack(fields)
        issued = time.monotonic_ns()
        return pack([*fields, issued, self._seal.mac(pack([self._cluster, *fields, issued]))])

    def unsealed(self, data: bytes) -> NodeLease | IncompatibleLease:
        """Parse bytes that `sealed` wrote, in any wire version. Raises WireError."""
        value = unpack(data)
        if isinstance(value, NodeLease):
            return _of_version(value.node_id, value.role, UNSEALED)
        if not isinstance(value, list) or [type(part) for part in value[:4]] != [int, str, str, bytes]:
            raise WireError(f"a {type(value).__name__} is not a lease")
        version, node_id, role, packed, *rest = value
        if version != WIRE_VERSION:
            return _of_version(node_id, role, version)
        if self._seal and not self._verified(value):
            return IncompatibleLease(node_id, role, _UNVERIFIED)
        lease = unpack(packed)
        if not isinstance(lease, NodeLease):
            raise WireError(f"a {type(lease).__name__} is not a lease")
        if self._seal and not self._renewed(lease, rest[0]):
            return IncompatibleLease(node_id, role, _REPEATED)
        return lease

    def _verified(self, value: list[object]) -> bool:
        *signed, mac = value
        return (
            len(value) == 6
            and type(signed[-1]) is int
            and isinstance(mac, bytes)
            and self._seal.verifies(pack([self._cluster, *signed]), mac)
        )

    def _renewed(self, lease: NodeLease, issued: int) -> bool:
        """Return whether the lease is the latest of its node, and was renewed recently.

        A process may have a lower epoch than the one before it, if the clock was set back while the registry had lost
        the epochs. It is trusted once the earlier process has not renewed its lease for a lease duration."""
        now, this = self._clock(), (lease.epoch, issued)
        latest = self._latest.get(lease.node_id)
        if latest is None or this > latest[:2] or (this < latest[:2] and now - latest.seen_s > self._lease_s):
            self._forget(now)
            self._latest[lease.node_id] = _Renewal(*this, now)
            return True
        return this == latest[:2] and now - latest.seen_s <= STALE * self._lease_s

    def _forget(self, now: float) -> None:
        """Forget nodes that have left, so that they do not accumulate in a cluster that scales."""
        gone = [name for name, latest in self._latest.items() if now - latest.seen_s > FORGOTTEN * self._lease_s]
        for node_id in gone:
            del self._latest[node_id]


def _of_version(node_id: str, role: str, version: int) -> IncompatibleLease:
    return IncompatibleLease(node_id, role, f"speaks wire version {version} and this process {WIRE_VERSION}")

"""A node's lease in the registry: address, role, capacity, load and rates, with durations in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.protocol.adapters import AdapterName
from kvferry.protocol.layout import WIRE_VERSION
from kvferry.protocol.messages import DecodeTarget, Pulse
from kvferry.protocol.wire import WireError, message, pack, unpack


@message(40)
@dataclass(frozen=True, slots=True)
class Load:
    """Current load of a node.

    Tokens of waiting requests are those still to be computed. Blocks: free + active + cached + granted = total; each is
    counted, so that one that nobody knows of is missed."""

    waiting_requests: int = 0
    waiting_tokens: int = 0
    running_requests: int = 0
    free_blocks: int = 0
    active_blocks: int = 0
    cached_blocks: int = 0
    granted_blocks: int = 0
    total_blocks: int = 0
    open_grants: int = 0


@message(41)
@dataclass(frozen=True, slots=True)
class Rates:
    """Learned moving averages, seeded by the self-test at start: prompt tokens computed per second, seconds per decode
    step, bytes shipped per second; seconds in which a block is read from its host memory, from its disk, and from the
    store that it shares with others (0: nothing is read from there)."""

    prefill_tokens_per_s: float = 1000.0
    step_s: float = 0.02
    ship_bytes_per_s: float = 1e9
    host_block_s: float = 0.0
    disk_block_s: float = 0.0
    store_block_s: float = 0.0


@message(50)
@dataclass(frozen=True, slots=True)
class Sent:
    """Recent transfers from a node to another one, beside ships: copies of running streams, or migrations.

    bytes_per_s: over that time. bytes_per_s: over that time."""

    kind: str
    node_id: str
    transfers: int
    blocks: int
    bytes_per_s: float


@message(42)
@dataclass(frozen=True, slots=True)
class NodeLease:
    """A node's row in the registry, renewed every second and gone five seconds after the last renewal.

    role is prefill or decode; state is ready or draining; http_url and link_address are what other processes dial.
    model is the model's name after its files, served_names are what the node was told to call it. max_num_seqs is how
    many requests it runs at once, 0: not told. adapters: those it can compute the model with. pulse: of its threads.
    leaving: it was asked to end, or to change its role, and works on until another node does. sent: to whom, the most
    bytes first. elastic: it may be asked to change its role; role_s: seconds since it last did, 0: it never did.
    pressure: decode nodes that its streams would fill, 0 of a prefill node.
    """

    node_id: str
    role: str
    epoch: int
    state: str
    http_url: str
    link_address: str
    fingerprint: str
    model: str
    max_model_len: int
    block_size: int
    block_bytes: int
    load: Load = field(default_factory=Load)
    rates: Rates = field(default_factory=Rates)
    served_names: tuple[str, ...] = ()
    max_num_seqs: int = 0
    adapters: tuple[AdapterName, ...] = ()
    pulse: Pulse = field(default_factory=Pulse)
    leaving: bool = False
    sent: tuple[Sent, ...] = ()
    elastic: bool = False
    role_s: float = 0.0
    pressure: float = 0.0

    @property
    def target(self) -> DecodeTarget:
        return DecodeTarget(self.node_id, self.epoch, self.link_address, self.fingerprint)

    def serves_same(self, other: NodeLease) -> bool:
        """Return whether both serve one model."""
        return self.model == other.model or bool({*self.served_names} & {*other.served_names})

    def relieved_by(self, other: NodeLease) -> bool:
        """Return whether the other node, of the same model, does what this one does, and stays."""
        return other.role == self.role and other.state == "ready" and not other.leaving


class IncompatibleLease(NamedTuple):
    """A lease that a node of another wire version wrote. Nothing else of it can be believed."""

    node_id: str
    role: str
    version: int


def sealed(lease: NodeLease) -> bytes:
    """The lease as the registry keeps it. What stands before the lease itself is the same in every wire version."""
    return pack([WIRE_VERSION, lease.node_id, lease.role, pack(lease)])


def unsealed(data: bytes) -> NodeLease | IncompatibleLease:
    """Parse what `sealed` wrote, in whatever wire version.

    Raises WireError."""
    value = unpack(data)
    if isinstance(value, NodeLease):
        return IncompatibleLease(value.node_id, value.role, UNSEALED)
    if not isinstance(value, list) or [type(part) for part in value] != [int, str, str, bytes]:
        raise WireError(f"a {type(value).__name__} is no lease")
    version, node_id, role, packed = value
    if version != WIRE_VERSION:
        return IncompatibleLease(node_id, role, version)
    lease = unpack(packed)
    if not isinstance(lease, NodeLease):
        raise WireError(f"a {type(lease).__name__} is no lease")
    return lease


UNSEALED = 4
"""The last wire version whose leases did not tell it."""

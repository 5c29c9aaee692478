"""What a node says of itself in the registry. Durations are seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.adapters import AdapterName
from protocol.messages import DecodeTarget
from protocol.wire import message


@message(40)
@dataclass(frozen=True, slots=True)
class Load:
    """What a node is doing now. Tokens of waiting requests are those still to be computed. Blocks: free + active +
    cached + granted = total."""

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
    step, bytes shipped per second."""

    prefill_tokens_per_s: float = 1000.0
    step_s: float = 0.02
    ship_bytes_per_s: float = 1e9


@message(42)
@dataclass(frozen=True, slots=True)
class NodeLease:
    """A node's row in the registry, renewed every second and gone five seconds after the last renewal.

    role is prefill or decode; state is ready or draining; http_url and link_address are what other processes dial.
    model is the model's name after its files, served_names are what the node was told to call it. max_num_seqs is how
    many requests it runs at once, 0: not told. adapters: those it can compute the model with.
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

    @property
    def target(self) -> DecodeTarget:
        return DecodeTarget(self.node_id, self.epoch, self.link_address, self.fingerprint)

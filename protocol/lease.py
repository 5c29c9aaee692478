"""Lease of a node in the registry (`NodeLease`): address, role, capacity, load and rates; durations in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.protocol.adapters import AdapterName
from kvferry.protocol.messages import DecodeTarget, Pulse
from kvferry.protocol.wire import message


@message(40)
@dataclass(frozen=True, slots=True)
class Load:
    """Current load of a node.

    waiting_tokens: tokens of waiting requests that are still to be computed. Blocks: free + active + cached + granted =
    total. Each state is counted separately, so a leaked block shows as a wrong sum."""

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
    """Learned rates of a node: moving averages, seeded by a self-test at start.

    Prompt tokens computed per second, seconds per decode step, bytes shipped per second. Seconds to read a block from
    host memory, from disk and from the shared store; 0: not read from there. Seconds between the tokens of a stream
    that runs alone, 0: unknown, and what each further stream adds to them. Tokens of images and audio encoded per
    second, 0: unknown."""

    prefill_tokens_per_s: float = 1000.0
    step_s: float = 0.02
    ship_bytes_per_s: float = 1e9
    host_block_s: float = 0.0
    disk_block_s: float = 0.0
    store_block_s: float = 0.0
    alone_s: float = 0.0
    stream_s: float = 0.0
    media_tokens_per_s: float = 0.0


@message(50)
@dataclass(frozen=True, slots=True)
class Sent:
    """Recent transfers from a node to another one, beside ships: replicas of running streams, or migrations.

    bytes_per_s: average over the statistics window."""

    kind: str
    node_id: str
    transfers: int
    blocks: int
    bytes_per_s: float


@message(42)
@dataclass(frozen=True, slots=True)
class NodeLease:
    """Row of a node in the registry, renewed every second and gone five seconds after the last renewal.

    role: prefill, decode or encode. state: ready or draining. http_url, link_address: dialled by other processes.
    model: the name from the model's files. served_names: names given by the settings. max_num_seqs: requests run at
    once, 0: unknown. adapters: those that the node holds. pulse: of its threads. leaving: the node is to end or
    change its role, and serves until another node is ready. sent: transfers by target node, the most bytes first.
    elastic: the node can change its role. role_s: seconds since it last did, 0: never. pressure: decode nodes that its
    streams would fill, 0 for prefill. engine: kind and version of the server behind an adapter, such as "vllm 0.32.0";
    empty: kvferry's own engine. engine_url: of that server's OpenAI API. guarantees: what an adapter measured that its
    engine keeps (GUARANTEES). modalities: media that prompts may hold, of protocol.media.MODALITIES; `transcription`:
    it also writes down what audio says. state_blocks: blocks of a checkpoint of its model's recurrent state, 0 without
    recurrent layers; state_stride: blocks from one regular checkpoint to the next. Where layers have windows, both are
    of pages instead, and window_pages is the most pages that a sequence needs, else 0. media_row_bytes: of what an
    encoder makes of one token of an image, kept in blocks; 0: nothing is."""

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
    engine: str = ""
    engine_url: str = ""
    guarantees: tuple[str, ...] = ()
    modalities: tuple[str, ...] = ()
    state_blocks: int = 0
    state_stride: int = 0
    media_row_bytes: int = 0
    window_pages: int = 0

    @property
    def target(self) -> DecodeTarget:
        """Return the node as the target of a ship."""
        return DecodeTarget(self.node_id, self.epoch, self.link_address, self.fingerprint)

    def blocks_with(self, chain: int) -> int:
        """Return the blocks that a request takes there for a chain of `chain` new blocks, and for what goes with it.

        That is a recurrent state, or pages of layers with windows, of at most a window's length."""
        return chain + self.state_blocks * min(chain, self.window_pages or 1)

    def serves_same(self, other: NodeLease) -> bool:
        """Return whether both nodes serve the same model."""
        return self.model == other.model or bool({*self.served_names} & {*other.served_names})

    def relieved_by(self, other: NodeLease) -> bool:
        """Return whether the other node, of the same model, is ready in the same role and stays."""
        return other.role == self.role and other.state == "ready" and not other.leaving


GUARANTEES = (
    "greedy_resume", "seeded_resume", "greedy_replay", "seeded_replay", "batch_invariant", "kv_events", "embeds",
    "classifies",
)  # fmt: skip
"""Guarantees that an engine behind an adapter may give.

greedy_resume, seeded_resume  a stream continues after its delivered tokens with the same tokens
greedy_replay, seeded_replay  the prompt computed again gives the same tokens
batch_invariant               a greedy output does not depend on what else runs
kv_events                     the engine reports each block that it caches or evicts
embeds, classifies            the engine makes vectors of prompts, or logits of a classifier's labels"""


class IncompatibleLease(NamedTuple):
    """Lease of a node that this process must not use; nothing else in the lease can be relied on.

    why: completes the sentence "the node …"."""

    node_id: str
    role: str
    why: str

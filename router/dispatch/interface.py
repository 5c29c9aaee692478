"""Interface between the API, which handles text, and the cluster, which handles tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.placement.capacity import Capacity
from kvferry.placement.types import NodeKey
from kvferry.protocol.adapters import ChangeAdapter
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.messages import TokenLogprobs
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate, Work
from kvferry.router.dispatch.pending_requests import PendingRequests
from kvferry.router.request_context import RequestContext


@dataclass(frozen=True, slots=True)
class Fork:
    """Request that others may fork from: its name on the wire, and the node that has its blocks, as far as known."""

    request_id: str
    node: NodeKey | None


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One sequence to work on for `call`.

    `request_id` begins with the call's id and tells its sequences apart. `fork_of`: one whose tokens these begin with;
    it is placed beside it while that costs least. `adapter`: id of the one that the model is computed with. `newcomer`:
    to be served before others' (see Job)."""

    call: RequestContext
    request_id: str
    token_ids: tuple[int, ...]
    work: Work
    namespace: str = ""
    fork_of: Fork | None = None
    adapter: str = ""
    newcomer: bool = False

    @property
    def params(self) -> SamplingParams:
        """Return the sampling parameters of work that generates."""
        assert isinstance(self.work, Generate), self.work
        return self.work.params


@dataclass(slots=True)
class Output:
    """Not frozen for the sake of speed, like TokenDelta.

    Next output tokens of a request, each exactly once and in order, whatever attempts and nodes they came from.
    finish_reason (stop, length, closed) comes with the last Output; `stop_token` is the ending token if one was drawn
    and is then the last of token_ids. `prompt_logprobs` come with the first Output when asked for; `vector` (float32,
    little-endian) is the one Output of work that generates nothing."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_token: int | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    vector: bytes | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """Route of a request for the header `x-kvferry-route`.

    Node ids (prefill None: prefilled on decode; decode None: finished on prefill), tokens that were reused and
    computed, and how many of the reused came from a third node."""

    prefill: str | None
    decode: str | None
    reuse: Reuse

    def __str__(self) -> str:
        return (
            f"prefill={self.prefill or 'none'} decode={self.decode or 'none'} "
            f"reused={self.reuse.cached_len} computed={self.reuse.computed}"
            + (f" fetched={self.reuse.fetched}" if self.reuse.fetched else "")
        )


class Enough(Exception):
    """Raised by who listens to a dispatch: its client has all that it asked for, as at a stop string."""


class Dispatch(Protocol):
    """One request under way.

    Iterate it for Outputs; it raises a KvferryError if the request cannot be finished. `route` and `fork` are set
    before the first Output is yielded."""

    route: Route | None

    @property
    def fork(self) -> Fork | None:
        """Return what other requests need to fork from it."""

    def __aiter__(self) -> AsyncGenerator[Output]: ...

    def listen(self, listener: Callable[[Output], None] | None) -> None:
        """Outputs that come while the next one is waited for go to `listener` instead, in their order and at once, as
        far as they are tokens and nothing else; the last one never does. What it raises, the iteration raises; after
        Enough it ends, as after `cancel(enough=True)`."""

    async def cancel(self, *, enough: bool = False) -> None:
        """Drop the request everywhere.

        `enough`: it ends well, its client has all that it asked for, as at a stop string; otherwise the client has
        left. Returns at once if it already ended."""


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """Facts on which all live nodes of a model agree.

    `fingerprint` roots the block hashes."""

    model: str
    max_model_len: int
    block_size: int
    fingerprint: str


class Adapters(Protocol):
    """Adapters that a model's nodes hold."""

    @property
    def ids(self) -> Mapping[str, str]:
        """Return adapter ids by name."""

    async def change(self, change: ChangeAdapter) -> None:
        """Have every node load or unload an adapter; on return it can be asked for, or not any more.

        Raises the error of a node that refused, with all as it was; NoNodes without nodes."""


class Cluster(Protocol):
    """The nodes of one model as the router sees them."""

    held: PendingRequests
    """Requests that none of them can take now."""

    @property
    def adapters(self) -> Adapters:
        """Return the adapters of its nodes."""

    def capacity(self) -> Capacity:
        """Return the nodes' capacity, at most a second old; called for every request."""

    def info(self) -> ClusterInfo | None:
        """None until a node that can decode (or any at all, for max_tokens=1) has been seen."""

    def leases(self) -> Sequence[NodeLease]:
        """Return the leases of all live nodes, whatever their state."""

    def ready(self) -> dict[str, int]:
        """Nodes of each role that could take a request now. One can be placed as soon as there is a decode node."""

    def trouble(self) -> str:
        """Return why this router may not replace the one before it.

        The registry has not told it of the nodes yet, or it told of nodes of another wire version, which other routers
        serve until a node of this version can decode. Once it is empty it stays so."""

    def start(self, spec: RequestSpec) -> Dispatch:
        """Begin a request. Raises Overloaded at once when the nodes are full."""

"""Interface of a model's cluster for the API: RequestSpec in, Dispatch of token Outputs out; adapters and media too."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.placement.capacity import Capacity
from kvferry.placement.types import NodeKey
from kvferry.protocol.adapters import ChangeAdapter
from kvferry.protocol.fast_init import fast_init
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.media import RenderRequest
from kvferry.protocol.messages import TokenLogprobs
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.speech import SpeechPart, SpeechRequest
from kvferry.protocol.work import Generate, Work
from kvferry.router.dispatch.pending_requests import PendingRequests
from kvferry.router.dispatch.prompt_media import PromptMedia, RenderedMedia
from kvferry.router.request_context import RequestContext


@dataclass(frozen=True, slots=True)
class Fork:
    """Running request from which others may fork: wire id, node with its blocks, and fingerprint that forks need."""

    request_id: str
    node: NodeKey | None
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Delivered:
    """Output tokens that an earlier dispatch of a request delivered, maybe in another router, and its route.

    The other tokens must come from nodes of the same `fingerprint`: other kernels would give other tokens."""

    token_ids: tuple[int, ...]
    route: Route | None = None
    fingerprint: str = ""


@fast_init
@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One token sequence to process for the API call `call`.

    `request_id` begins with the call's id and is unique among the call's sequences.
    `fork_of`    a request with the same first tokens; placement prefers its node while that is cheapest
    `adapter`    id of the LoRA adapter, empty for the base model
    `newcomer`   served ahead of other tenants' requests (see Job)
    `media`      images, audio and video of the prompt; None: text alone
    `delivered`  tokens after which the output continues; None: it begins. session, retention: see Job"""

    call: RequestContext
    request_id: str
    token_ids: tuple[int, ...]
    work: Work
    namespace: str = ""
    fork_of: Fork | None = None
    adapter: str = ""
    newcomer: bool = False
    media: PromptMedia | None = None
    delivered: Delivered | None = None
    session: str = ""
    retention: str = ""

    @property
    def params(self) -> SamplingParams:
        """Return the sampling parameters; the work must generate tokens."""
        assert isinstance(self.work, Generate), self.work
        return self.work.params


@dataclass(slots=True)
class Output:
    """Next output tokens of a request, each exactly once and in order, across all attempts and nodes.

    `finish_reason` (stop, length, closed) comes with the last Output. `stop_token` is the token that ended the output,
    if one was drawn; it is then the last of `token_ids`. `prompt_logprobs` come with the first Output when requested.
    `vector` (float32, little-endian) is the single Output of work that generates nothing. `replayed`: it was counted
    when it was computed. Not frozen for speed, like TokenDelta."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_token: int | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    vector: bytes | None = None
    replayed: bool = False


@fast_init
@dataclass(frozen=True, slots=True)
class Route:
    """Nodes and token counts of a request, formatted for the header `x-kvferry-route`.

    `prefill` and `decode` are node ids. `prefill` is None if the decode node computed the prompt; `decode` is None if
    the request finished on the prefill node. `reuse` counts the tokens that were reused, computed, and fetched from a
    third node. `late`: the node reports that only with the last token; until then all count as computed."""

    prefill: str | None
    decode: str | None
    reuse: Reuse
    late: bool = False

    def __str__(self) -> str:
        nodes = f"prefill={self.prefill or 'none'} decode={self.decode or 'none'}"
        if self.late:
            return nodes
        fetched = f" fetched={self.reuse.fetched}" if self.reuse.fetched else ""
        return f"{nodes} reused={self.reuse.cached_len} computed={self.reuse.computed}{fetched}"


class OutputComplete(Exception):
    """Raised by the listener of a dispatch when its client has all that it asked for, as at a stop string."""


class Dispatch(Protocol):
    """One running request.

    Iterate it for Outputs; the iteration raises a KvferryError if the request cannot finish. `route` and `fork` are set
    before the first Output is yielded."""

    route: Route | None

    @property
    def fork(self) -> Fork | None:
        """Return the data that other requests need to fork from this one."""

    def __aiter__(self) -> AsyncGenerator[Output]: ...

    def listen(self, listener: Callable[[Output], None] | None) -> None:
        """Send outputs directly to `listener`, in order, while the iteration waits for the next one.

        Only outputs that carry nothing but tokens take this path; the last output never does. The iteration raises what
        the listener raises. After OutputComplete it ends as after `cancel(complete=True)`."""

    def calls_tools(self, names: Collection[str]) -> None:
        """Send the nodes, at the output's end, the tools that it calls: its session is then likely to continue."""

    async def cancel(self, *, complete: bool = False) -> None:
        """Cancel the request on all nodes.

        `complete=True` ends it as a success: the client has all that it asked for, as at a stop string. Otherwise the
        client has disconnected. Returns at once if the request has already ended."""


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """Facts that hold for every node of a model.

    fingerprints: those of its usable nodes, in order; see `router.nodes.model_nodes`"""

    model: str
    max_model_len: int
    fingerprints: tuple[str, ...] = ()


class Adapters(Protocol):
    """LoRA adapters that a model's nodes hold."""

    @property
    def ids(self) -> Mapping[str, str]:
        """Return adapter ids by name."""

    async def change(self, change: ChangeAdapter) -> None:
        """Load or unload an adapter on every node; on return requests can, or no longer can, use it.

        Raises the error of a node that refused, after restoring the previous state. Raises NoNodes without nodes."""


class MediaServices(Protocol):
    """Services of a model's nodes for media, besides generating."""

    def check(self, abilities: Collection[str], adapter: str = "") -> None:
        """Raise InvalidRequest if no node has these abilities, and NoNodes if none is known at present.

        abilities: of those in leases' modalities. adapter: id of a LoRA adapter that the node must have; empty: none.
        """

    def modalities(self, adapter: str = "") -> frozenset[str]:
        """Return the abilities, as in leases' modalities, that some node with the adapter has; empty without nodes."""
        ...

    async def render(self, request: RenderRequest, modalities: Collection[str]) -> RenderedMedia:
        """Return a chat's prompt. Raises NoNodes, or the error of the node that could not make it."""
        ...

    async def transcribe(self, request: SpeechRequest, deliver: Callable[[SpeechPart], None]) -> None:
        """Deliver a node's answer as it comes. Raises NoNodes, or the error of the node that failed."""


class Cluster(Protocol):
    """The nodes of one model as the router sees them."""

    held: PendingRequests
    """Requests that wait because no node can take them now."""

    @property
    def media(self) -> MediaServices:
        """Return the nodes' services for media."""

    @property
    def adapters(self) -> Adapters:
        """Return the adapters of the model's nodes."""

    def capacity(self) -> Capacity:
        """Return the nodes' capacity, at most one second old; called for every request."""

    def info(self) -> ClusterInfo | None:
        """Return the model's facts; None until a decode node has been seen (any node, for max_tokens=1)."""

    def leases(self) -> Sequence[NodeLease]:
        """Return the leases of all live nodes, whatever their state."""

    def ready(self) -> dict[str, int]:
        """Return how many nodes of each role can take a request now; placement needs at least one decode node."""

    def trouble(self) -> str:
        """Return why this router may not replace its predecessor yet; empty once it may, and from then on.

        Reasons: the registry lists no nodes yet, or only nodes of another wire version can decode."""

    def close_session(self, session: str) -> None:
        """Notify all nodes that a session is over, by its name on the wire."""

    def start(self, spec: RequestSpec) -> Dispatch:
        """Begin a request; raise Overloaded at once when the nodes are full."""

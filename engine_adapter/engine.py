"""Interface between an adapter and the engine server beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvferry.engine_adapter.measurable_media import MeasurableMedia
from kvferry.engine_adapter.pooling_engine import PoolingEngine
from kvferry.protocol.media import MediaItem
from kvferry.protocol.messages import Job, TokenLogprobs
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Grammar


@dataclass(frozen=True, slots=True)
class KvEventSource:
    """ZeroMQ addresses of an engine's KV events: of its publisher and of its replay socket (empty: none)."""

    endpoint: str
    replay: str = ""
    topic: str = ""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine server says about itself.

    kind, version   such as "vllm", "0.32.0"
    process         differs for every start of the engine; empty: unknown
    model           name or path of the model that the engine loaded
    served_names    names that its clients use
    max_model_len   longest prompt plus output in tokens
    block_size      tokens per block of its prefix cache
    total_blocks    blocks of its cache; 0: unknown
    max_num_seqs    concurrent requests; 0: unknown
    arithmetic      what else two engines must share to give the same tokens, such as dtypes, in any form
    adapters        names of its LoRA adapters
    kv_events       where it publishes KV events; None: nowhere
    exact           its answers have token ids; False: they are computed from its text, so no guarantee holds
    kv_transfer     how it fetches KV blocks from another engine of its kind: nixl, or rooms; empty: not at all
    kv_role         prefill or decode, for an engine that does only this part; empty: it does both"""

    kind: str
    version: str
    process: str
    model: str
    served_names: tuple[str, ...]
    max_model_len: int
    block_size: int
    total_blocks: int = 0
    max_num_seqs: int = 0
    arithmetic: str = ""
    adapters: tuple[str, ...] = ()
    kv_events: KvEventSource | None = None
    exact: bool = True
    kv_transfer: str = ""
    kv_role: str = ""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Current load of an engine.

    process: see EngineFacts. cache_usage: share of its blocks that running requests hold, 0 to 1."""

    process: str = ""
    running_requests: int = 0
    waiting_requests: int = 0
    cache_usage: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One request to an engine, in tokens.

    request_id   unique among all calls of this adapter
    token_ids    the prompt, then output tokens that the engine is to continue
    adapter      name of a LoRA adapter; empty: none
    cache_salt   separates the cached prefixes of tenants; empty: shared
    media        images, audio and video of the prompt
    reference    the KV blocks of exactly these tokens in another engine, in its own words; empty: none"""

    request_id: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    grammar: Grammar | None = None
    adapter: str = ""
    cache_salt: str = ""
    media: tuple[MediaItem, ...] = ()
    reference: str = ""


@dataclass(slots=True)
class EngineDelta:
    """New output of a call; treat it as immutable.

    token_ids       new tokens; a token that ends the output is among them
    finish_reason   "stop" or "length"; None: the output continues
    cached_tokens   prompt tokens that the engine reused, as soon as it reports them; None: not yet
    prompt_logprobs with the first delta if asked for; entry 0 is None"""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    cached_tokens: int | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt that an engine computed for another one.

    delta       its first token; the finish_reason is "length" unless the token ends the output
    reference   where its blocks are, for one call of the other engine; empty: the engine gave none"""

    delta: EngineDelta
    reference: str


class Engine(Protocol):
    """Client of one engine server.

    Every call raises NodeDown if the server's connection breaks or is refused, NodeLost if it does not answer,
    InvalidRequest if it refuses the request for its contents, and StepFailed for any other refusal or failure of one
    request alone."""

    @property
    def media(self) -> MeasurableMedia | None:
        """Return the part that concerns media; None for an engine that takes only text."""
        ...

    @property
    def pooling(self) -> PoolingEngine | None:
        """Return the part that makes vectors of prompts; None for a protocol that has none."""
        ...

    async def facts(self) -> EngineFacts:
        """Return what the engine says about itself; it may change only with `process`, or a role."""
        ...

    async def health(self) -> None:
        """Return if the engine is well; raise NodeDown if it is not, or is gone."""
        ...

    async def load(self) -> EngineLoad:
        """Return the engine's current load."""
        ...

    def check(self, job: Job) -> None:
        """Raise InvalidRequest, naming the field, if the engine cannot do what a job that generates asks for."""
        ...

    async def generate(self, call: EngineCall, deliver: Callable[[EngineDelta], None]) -> None:
        """Run a call; deliver its output as it comes. Returns after the delta that has a finish_reason.

        If it is cancelled, the engine drops the request."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


@runtime_checkable
class TransferEngine(Engine, Protocol):
    """Client of an engine that can compute a prompt for another engine, which fetches the blocks."""

    async def prefill(self, call: EngineCall) -> Prefilled:
        """Compute the prompt and its first token. The engine keeps the blocks until they are fetched or a lease ends.

        Raises what `generate` raises. If it is cancelled, the engine drops the request."""
        ...


@runtime_checkable
class RoomEngine(Engine, Protocol):
    """Client of an engine that computes prompts while another engine fetches the blocks, in rooms where both meet.

    A call of the other engine names the room by its `reference`."""

    def room(self, host: str) -> str:
        """Return the reference of a new room. host: see `engines.sglang_rooms.Rooms.draw`."""
        ...

    async def prefill_leg(self, call: EngineCall) -> EngineDelta:
        """Compute the prompt of a call that names a room, and its first token; return once the blocks are fetched.

        Raises what `generate` raises. If it is cancelled or fails, both servers abandon the room."""
        ...


@runtime_checkable
class ElasticEngine(RoomEngine, Protocol):
    """Client of a prefill or decode engine that can change to the other role without a new process."""

    async def switch_role(self, role: str, graphs_gb: float = 0.0) -> None:
        """Make the engine a prefill or decode engine; if it has the role already, only the refusals below can occur.

        graphs_gb: GB of GPU memory for a decode engine's CUDA graphs; 0: its default. Raises what other calls
        raise, and Overloaded while requests run there. After other errors the engine may have either role, or none."""
        ...

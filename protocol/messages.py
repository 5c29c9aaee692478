"""Messages between routers and nodes about requests: jobs, tokens, prefill, cancellation, migration and frames.

All carry (request_id, attempt), which makes every step idempotent. Durations are seconds; none has a timestamp."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.media import MediaItem
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.protocol.process_names import NodeName
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.wire import message
from kvferry.protocol.work import Generate, Grammar, Work


@message(2)
@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the token itself (rank 1 = most likely) and of the most likely ones."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@message(10, checked=True)
@dataclass(frozen=True, slots=True)
class DecodeTarget:
    """Destination of a ship: `epoch` fences a restarted process, `link_address` is host:port."""

    node_id: str
    epoch: int
    link_address: str
    fingerprint: str


@message(55, checked=True)
@dataclass(frozen=True, slots=True)
class Holder:
    """Node known to hold a job's first `blocks` blocks; fetching them takes less time than computing them."""

    node: DecodeTarget
    blocks: int


@message(11, checked=True)
@dataclass(frozen=True, slots=True)
class Job:
    """Work of one attempt, the same for every node that handles it.

    token_ids         the prompt, then output tokens that earlier attempts delivered
    prompt_len        how many of token_ids are the prompt
    work              what the model is to do
    router_id         router whose token stream gets the output
    namespace         tenant namespace, part of the root of the block hashes
    deadline_s        seconds left for the request when the message was sent
    adapter           id of the LoRA adapter, part of the root too; empty: none
    fork_of           request_id of a request whose token_ids these begin with: where its blocks are, they are shared,
                      and the common part of its last block is copied; empty: none
    trace             W3C `traceparent` of the attempt; empty: none
    ahead             of a migrating stream: output tokens beyond token_ids for which blocks are granted, too
    buddy             node to which a stream's full blocks are replicated while it runs (see Copy); None: none
    newcomer          its tenant has used less of the nodes than others with running requests: its prompt is first
    predicted         (tokens, epoch): leading tokens that the router expects in the cache of the computing node or
                      fetched to it, and that process's epoch
    holder            node from which the computing node may fetch leading blocks of the prompt; None: none
    encoder           node from which it may fetch the rows of its media; None: it encodes them itself
    media             images, audio and video of the prompt in order, for nodes whose lease has their modalities
    failures          attempts of the request that failed or were refused before, for which it precedes others; a
                      second attempt beside one that runs has none
    session           name of the client's session (see protocol.sessions); empty: none
    retention         how long the client asks to keep the prompt's blocks, such as 1h; empty: none.
                      rope_offset: see RenderedPrompt"""

    request_id: str
    attempt: int
    token_ids: tuple[int, ...]
    prompt_len: int
    work: Work
    router_id: str
    namespace: str = ""
    deadline_s: float = 600.0
    fork_of: str = ""
    trace: str = ""
    adapter: str = ""
    newcomer: bool = False
    ahead: int = 0
    buddy: DecodeTarget | None = None
    predicted: tuple[int, int] = (0, 0)
    holder: Holder | None = None
    media: tuple[MediaItem, ...] = ()
    failures: int = 0
    session: str = ""
    retention: str = ""
    rope_offset: int = 0
    encoder: DecodeTarget | None = None

    @property
    def params(self) -> SamplingParams:
        """Return the sampling parameters of work that generates."""
        assert isinstance(self.work, Generate), self.work
        return self.work.params

    @property
    def grammar(self) -> Grammar | None:
        """Return the grammar of work that generates; None otherwise."""
        return self.work.grammar if isinstance(self.work, Generate) else None


@message(12, checked=True)
@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """Router → prefill, `POST /attempts/prefill`; answered by FirstToken, then ShipDone or AttemptFailed.

    Without a target the request must end with its next token or with none (max_tokens 1, embeddings, the last token of
    a retry)."""

    job: Job
    target: DecodeTarget | None = None


@message(13, checked=True)
@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Router → decode, `POST /attempts/generate`: prefill locally and generate on the token stream."""

    job: Job


@message(14, checked=True)
@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Router → any node, `POST /attempts/cancel`: drop all attempts up to `attempt`, also if they come later."""

    request_id: str
    attempt: int


@message(15, checked=True)
@dataclass(frozen=True, slots=True)
class MoveRequest:
    """Router → draining decode node, `POST /attempts/move`: migrate the stream to the target as attempt `later`.

    Answered once the target has it; AttemptFailed with code `moved` then follows all output of this node on the token
    stream. Refused with the reason why the stream stays."""

    request_id: str
    attempt: int
    later: int
    target: DecodeTarget


@message(20)
@dataclass(slots=True)
class TokenDelta:
    """New output tokens of one attempt; treat it as immutable.

    It is not frozen because creating a frozen one takes four times as long, and every token needs one. index: position
    of the first token among the request's output tokens, over all attempts. finish_reason: None, stop, length, or
    closed (the grammar is complete and was ended before max_tokens would cut it). vector: float32, little-endian, the
    whole result of work that generates nothing. stop_token: the token that ended the output, the last of token_ids.
    reuse: with the first delta of a locally prefilled attempt. prompt_logprobs (entry 0 is None): with the first delta
    if asked for."""

    request_id: str
    attempt: int
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_token: int | None = None
    reuse: Reuse | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    vector: bytes | None = None


@message(21)
@dataclass(frozen=True, slots=True)
class FirstToken:
    """Prefill → router, once the first token is sampled. `queue_s` and `compute_s` are this attempt's times."""

    delta: TokenDelta
    queue_s: float
    compute_s: float


@message(22)
@dataclass(frozen=True, slots=True)
class ShipDone:
    """Prefill → router: the decode node acknowledged the commit and owns the request now.

    ship_s: seconds with blocks on the link or the acknowledgement pending; exposed_s: those after the first token."""

    request_id: str
    attempt: int
    blocks: int
    bytes: int
    ship_s: float
    exposed_s: float


@message(23)
@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """Any node → router: this attempt ended without finishing. `code` names a class of protocol.errors.

    later: the attempt that continues a migrated stream."""

    request_id: str
    attempt: int
    code: str
    message: str
    later: int = -1


@message(49)
@dataclass(frozen=True, slots=True)
class Deviation:
    """Decode → router: `sender`'s ship arrived as sent, and differs from what this node computes."""

    request_id: str
    sender: NodeName


@message(44)
@dataclass(frozen=True, slots=True)
class Pulse:
    """Seconds since each thread of a node made progress (idle engine: 0), and the usual time of the present step."""

    engine_s: float = 0.0
    link_s: float = 0.0
    loop_s: float = 0.0
    usual_s: float = 0.0


@message(24)
@dataclass(frozen=True, slots=True)
class StepFrame:
    """Node → router on the standing stream: one engine step's output for all requests of that router.

    `number` counts a router's frames from 1. An empty frame is a heartbeat, with a pulse and the last frame's number.
    """

    deltas: tuple[TokenDelta, ...] = ()
    failed: tuple[AttemptFailed, ...] = ()
    number: int = 0
    pulse: Pulse | None = None
    deviations: tuple[Deviation, ...] = ()

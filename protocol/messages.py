"""Messages between the router and its nodes. Durations are seconds; no message carries a timestamp.

All carry (request_id, attempt): every step is idempotent by them.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """A node that holds more of a job's tokens than the one where it goes: so many leading blocks, as far as is known,
    and fetching them takes less time than computing them."""

    node: DecodeTarget
    blocks: int


@message(11, checked=True)
@dataclass(frozen=True, slots=True)
class Job:
    """The work of one attempt, the same for every node that touches it.

    token_ids         the prompt, then any output tokens that an earlier attempt already delivered
    prompt_len        how many of token_ids are the prompt
    work              what is asked of the model
    router_id         whose token stream gets the output
    namespace         tenant namespace, part of the root of the block hashes
    deadline_s        seconds left for the request when the message was sent
    adapter           id of the adapter that the model is computed with, part of the root too; empty: none
    fork_of           request_id of one whose token_ids these begin with: where its blocks are they are shared, and what
                      both have of its last one is copied. Empty: none
    trace             W3C `traceparent` of the attempt; empty: none
    ahead             of a stream that moves: output tokens beyond token_ids for which blocks are granted with those of
                      token_ids, for it runs on until it stands
    buddy             where a stream's full blocks are copied to while it runs (see Copy); None: nowhere
    newcomer          its tenant has had less of the nodes than others whose requests are under way: until its first
                      token it goes before theirs
    predicted         (tokens, epoch): how many leading tokens the router expects to be cached where they would be
                      computed, or fetched to there, and in which process
    holder            where the node that computes the prompt may fetch leading blocks of it; None: nowhere
    """

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

    @property
    def params(self) -> SamplingParams:
        """Return the sampling parameters of work that generates."""
        assert isinstance(self.work, Generate), self.work
        return self.work.params

    @property
    def grammar(self) -> Grammar | None:
        """Return the grammar of work that generates."""
        return self.work.grammar if isinstance(self.work, Generate) else None


@message(12, checked=True)
@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """Router → prefill, `POST /attempts/prefill`. Without a target the request must end with its next
    token, or without one (max_tokens 1, embeddings, the last token of a retried request). The answer is a stream of
    FirstToken, then ShipDone or AttemptFailed."""

    job: Job
    target: DecodeTarget | None = None


@message(13, checked=True)
@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Router → decode, `POST /attempts/generate`: prefill locally and generate; output goes to the token stream."""

    job: Job


@message(14, checked=True)
@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Router → any node, `POST /attempts/cancel`: drop all attempts of the request up to `attempt`, also later-arriving
    messages of them."""

    request_id: str
    attempt: int


@message(15, checked=True)
@dataclass(frozen=True, slots=True)
class MoveRequest:
    """Router → decode node that drains, `POST /attempts/move`: hand the stream `attempt` over to another decode node,
    which goes on with it as attempt `later`. Answered once that node has it, and AttemptFailed with the code `moved`
    comes on the token stream behind all that was generated here; or refused with why it runs on here."""

    request_id: str
    attempt: int
    later: int
    target: DecodeTarget


@message(20)
@dataclass(slots=True)
class TokenDelta:
    """Not to be changed; made for every token, and to make a frozen one takes four times as long.

    New output tokens of one attempt. `index` is the place of the first of them among the request's output tokens
    (0 = first output token of the whole request, whatever attempt). finish_reason: None, stop, length, or
    closed: what its grammar asks for is complete, and was ended before max_tokens would have cut it.
    `vector` (float32, little-endian) is the whole answer of work that generates nothing: no tokens come with it.
    `stop_token` is the token that ended it, if one did; it is the last of token_ids. `reuse` comes with the first delta
    of a locally prefilled attempt. `prompt_logprobs` (entry 0 is None) come with the first delta when asked for."""

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
    """Prefill → router, as soon as the first token is sampled. `queue_s` and `compute_s` are this attempt's times."""

    delta: TokenDelta
    queue_s: float
    compute_s: float


@message(22)
@dataclass(frozen=True, slots=True)
class ShipDone:
    """Prefill → router: the decode node acknowledged the commit; it owns the request now. `ship_s` are the
    seconds in which blocks were on the link or the acknowledgement was awaited, `exposed_s` those of them after the
    first token was sampled."""

    request_id: str
    attempt: int
    blocks: int
    bytes: int
    ship_s: float
    exposed_s: float


@message(23)
@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """Any node → router: this attempt ended without finishing. `code` names a class of protocol.errors. `later`: of one
    that moved, the attempt as which it goes on."""

    request_id: str
    attempt: int
    code: str
    message: str
    later: int = -1


@message(49)
@dataclass(frozen=True, slots=True)
class Deviation:
    """Decode → router: what `sender` shipped for the request came as it was sent, and this node computes others."""

    request_id: str
    sender: NodeName


@message(44)
@dataclass(frozen=True, slots=True)
class Pulse:
    """Seconds since each thread of a node was seen to move, of an idle engine 0; and what its turns take as a rule."""

    engine_s: float = 0.0
    link_s: float = 0.0
    loop_s: float = 0.0
    usual_s: float = 0.0


@message(24)
@dataclass(frozen=True, slots=True)
class StepFrame:
    """Node → router on the standing stream: one engine step's output for all requests of that router. `number` counts
    the frames of a router from 1. An empty frame is the heartbeat: its number is the last one's, and it has a pulse."""

    deltas: tuple[TokenDelta, ...] = ()
    failed: tuple[AttemptFailed, ...] = ()
    number: int = 0
    pulse: Pulse | None = None
    deviations: tuple[Deviation, ...] = ()


@message(45, checked=True)
@dataclass(frozen=True, slots=True)
class Seen:
    """Router → node, `POST /streams/{router_id}/seen`, every second: the frames of the router's stream up to `number`
    have come. A router that says so no more is taken for frozen."""

    number: int

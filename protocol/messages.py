"""Messages between the router and its nodes. Durations are seconds; no message carries a timestamp.

All carry (request_id, attempt): every step is idempotent by them.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.sampling import SamplingParams
from protocol.wire import message
from protocol.work import Generate, Grammar, Work


@message(2)
@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the token itself (rank 1 = most likely) and of the most likely ones."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@message(3)
@dataclass(frozen=True, slots=True)
class Reuse:
    """Where the prompt's tokens came from: prompt_len = reused_prefill + reused_decode + fetched + computed."""

    prompt_len: int
    reused_prefill: int = 0
    reused_decode: int = 0
    fetched: int = 0
    computed: int = 0

    @property
    def cached_len(self) -> int:
        return self.reused_prefill + self.reused_decode + self.fetched

    @property
    def balanced(self) -> bool:
        """Whether it adds up, without a negative part."""
        parts = (self.reused_prefill, self.reused_decode, self.fetched, self.computed)
        return min(parts) >= 0 and sum(parts) == self.prompt_len


@message(10, checked=True)
@dataclass(frozen=True, slots=True)
class DecodeTarget:
    """The decode node a prefill node ships to: `epoch` fences a restarted process, `link_address` is host:port."""

    node_id: str
    epoch: int
    link_address: str
    fingerprint: str


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

    @property
    def params(self) -> SamplingParams:
        """How output tokens are drawn, of work that generates."""
        assert isinstance(self.work, Generate), self.work
        return self.work.params

    @property
    def grammar(self) -> Grammar | None:
        """What the output must match, of work that generates."""
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


@message(20)
@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New output tokens of one attempt. `index` is the place of the first of them among the request's output tokens
    (0 = first output token of the whole request, whatever attempt). finish_reason: None, stop, length.
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
    """Prefill → router: the decode node acknowledged the commit; it owns the request now. `ship_s` is from the first
    block posted to the acknowledgement, `exposed_s` the part of it after the first token was sampled."""

    request_id: str
    attempt: int
    blocks: int
    bytes: int
    ship_s: float
    exposed_s: float


@message(23)
@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """Any node → router: this attempt ended without finishing. `code` names a class of protocol.errors."""

    request_id: str
    attempt: int
    code: str
    message: str


@message(24)
@dataclass(frozen=True, slots=True)
class StepFrame:
    """Decode → router on the standing stream: one engine step's output for all requests of that router.
    An empty frame is the heartbeat."""

    deltas: tuple[TokenDelta, ...] = ()
    failed: tuple[AttemptFailed, ...] = ()

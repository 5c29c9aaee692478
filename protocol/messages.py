"""Messages between router, prefill and decode nodes. Durations are seconds; no message carries a timestamp.

All carry (request_id, attempt): every step is idempotent by them. `transfer` names one ship on the link between one
prefill and one decode process and is never reused by that prefill process.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.sampling import SamplingParams
from protocol.wire import message

message(1)(SamplingParams)


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


@message(10)
@dataclass(frozen=True, slots=True)
class DecodeTarget:
    """The decode node a prefill node ships to: `epoch` fences a restarted process, `link_address` is host:port."""

    node_id: str
    epoch: int
    link_address: str
    fingerprint: str


@message(11)
@dataclass(frozen=True, slots=True)
class Job:
    """The work of one attempt, the same for every node that touches it.

    token_ids         the prompt, then any output tokens that an earlier attempt already delivered
    prompt_len        how many of token_ids are the prompt
    router_id         whose token stream gets the output
    namespace         tenant namespace, part of the root of the block hashes
    deadline_s        seconds left for the request when the message was sent
    """

    request_id: str
    attempt: int
    token_ids: tuple[int, ...]
    prompt_len: int
    params: SamplingParams
    router_id: str
    namespace: str = ""
    deadline_s: float = 600.0


@message(12)
@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """Router → prefill, `POST /attempts/prefill`. Without a target the request must end with its next
    token (max_tokens 1, scoring, the last token of a retried request). The answer is a stream of FirstToken, then
    ShipDone or AttemptFailed."""

    job: Job
    target: DecodeTarget | None = None


@message(13)
@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Router → decode, `POST /attempts/generate`: prefill locally and generate; output goes to the token stream."""

    job: Job


@message(14)
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


@message(30)
@dataclass(frozen=True, slots=True)
class GrantRequest:
    """Prefill → decode over the link: reserve blocks for this job and post receives for them."""

    transfer: int
    epoch: int
    fingerprint: str
    job: Job


@message(31)
@dataclass(frozen=True, slots=True)
class Grant:
    """Decode → prefill: receives are posted for prompt blocks first_block … first_block + block_count - 1; decode
    already holds the earlier ones (`cached_len` = first_block * block_size tokens). `nonce` separates the tags of
    connections."""

    transfer: int
    first_block: int
    block_count: int
    nonce: int


@message(32)
@dataclass(frozen=True, slots=True)
class Refusal:
    """Decode → prefill: no grant, or the ship failed on this side. `code` names a class of protocol.errors."""

    transfer: int
    code: str
    message: str


@message(33)
@dataclass(frozen=True, slots=True)
class Commit:
    """Prefill → decode, last message of a ship: every block was sent. checksums: CRC32 per shipped block, in order (-1:
    not taken for this block), or empty where the sender took none. `first` is the delta with the first token; `reuse`
    the prompt's accounting."""

    transfer: int
    block_count: int
    checksums: tuple[int, ...]
    first: TokenDelta


@message(34)
@dataclass(frozen=True, slots=True)
class CommitAck:
    """Decode → prefill: all blocks landed and verified; the sender may forget the transfer."""

    transfer: int


@message(35)
@dataclass(frozen=True, slots=True)
class Abort:
    """Prefill → decode: the ship will not be completed; free the grant once its receives are quiet."""

    transfer: int
    reason: str


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

    @property
    def target(self) -> DecodeTarget:
        return DecodeTarget(self.node_id, self.epoch, self.link_address, self.fingerprint)

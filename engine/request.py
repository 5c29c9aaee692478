"""Request: all state of one attempt inside the engine: its tokens, blocks, hashes, lengths, and what it waits for."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import torch

from kvferry.engine.block_interfaces import GRANT, REQUEST
from kvferry.engine.cache_use import MAX_NAME, CacheUse
from kvferry.engine.media.request_media import RequestMedia
from kvferry.engine.ngram_drafts import NgramDrafts
from kvferry.engine.request_states import MOVES, Awaits, State
from kvferry.engine.sampler import SampleRow
from kvferry.engine.state_rows import StateRows
from kvferry.engine.window_blocks import WindowBlocks
from kvferry.kernels.lora import Adapter
from kvferry.protocol.hashing import NO_EXTRAS, chain
from kvferry.protocol.messages import Job, TokenLogprobs
from kvferry.protocol.prefix_reuse import Missed
from kvferry.protocol.work import Generate

Key = tuple[str, int]
Place = tuple[bool, int, bool, float, int]
"""Queue order: streams before prompts, retried attempts first, newcomers first, by virtual due time, by arrival."""


def key_of(job: Job) -> Key:
    """Return (request id, attempt), which identifies one attempt."""
    return (job.request_id, job.attempt)


@dataclass(slots=True, eq=False)
class Request:
    """One attempt in progress on this engine. Its lengths, in tokens from the left:

        0              cached_len         computed_len           len(token_ids)
        |              |                  |                      |
        |-- found -----|-- computed here -|-- uncomputed --------|
        |------------- K/V in the cache --|
        |-------------------- prompt ---------------|-- output --|
        |                                           |            |
        0                                           prompt_len   len(token_ids)

    0 <= cached_len <= computed_len <= len(token_ids), once admitted. `prompt_len` (of the job) lies anywhere: a chunked
    prompt is computed up to before it, and an attempt that resumes has output in job.token_ids, which then end behind
    it. Between steps a running stream has one uncomputed token, the last drawn. A preempted request falls back to
    computed_len 0 (then to what the cache still has); cached_len and token_ids stay.

    In blocks of block_size tokens, with b(n) = blocks_for(n):

        0          first_block   shipped       registered   computed_len // block_size       len(block_ids)
        |          |             |             |            |                                |
        |-- full, hashed, findable ------------|-- full ----|-- being filled, or empty ------|
        |-- decode |-- announced |-- to be announced ...

    registered <= computed_len // block_size <= len(hashes) = len(token_ids) // block_size (registered catches up when
    a step is committed, over several steps where thousands arrived at once), and b(len(token_ids)) <= len(block_ids)
    when its slice is scheduled. Only ships have first_block and shipped: a ship announces blocks first_block ...
    b(prompt) - 1, each once, full ones as they are registered and the last with the prompt's end.

    state         see engine.request_states; `awaits`: conditions that must be met before it can run
    grant         grant by which its prompt arrives, None once it is here or computed here; it holds blocks until then
    place         position in the engine's queues, least first (see RequestTable)
    behind        request whose arriving prompt it awaits in order to share the blocks
    held_for_transfer  the link may touch its blocks: when it ends they stay held until the link is quiet
    token_ids     prompt and output so far; only ever extended
    computed_len  how many of them have their K/V in the cache
    cached_len    how many tokens of the prompt were cached when it was first admitted
    fetched       (first, end) of the prompt's blocks that came from another node while it awaited them
    missed        blocks that were predicted to be cached and were not (see Reuse)
    block_ids     the chain that holds the K/V, held as a whole
    state_rows, windows  rows of its recurrent state, pages of its layers with windows, while it has blocks; or None
    state_blocks  blocks after its chain in which a transfer takes its state or pages to another node, or brings them
    pause_at      computed tokens at which a stream with such blocks waits for the end of its migration, or None
    hashes        of the full blocks of token_ids, extended as it grows
    registered    how many leading blocks are findable
    replacements  how often one of its blocks gave way to a findable one of equal content
    written       how many blocks became findable by it with content that the pool did not have before
    transfer      ship that sends its blocks (prefill), else None
    first_block   of a ship or a grant: decode holds the blocks before it
    shipped       index after the last block handed to the sender
    copied        how many leading blocks the buddy of its job reported; None: it was not asked
    prefill_only  ends with its first output token
    generates     tokens are drawn; if not, a vector is read from its prompt
    queued        time at which it was queued: on arrival or when preempted
    lacking       while queued: prompt tokens that the cache lacked when it was queued
    adapter       adapter weights that its tokens are computed with
    media         images, audio and video of its prompt; None: text alone
    cache_use     its session, as the eviction order sees it
    sample_row, drafts  sampling state, from the first token on; draft proposals of its output, once it streams
    pooled        float32 [hidden], pooled state of the tokens computed so far, if it reads and draws nothing"""

    job: Job
    root: bytes
    block_size: int
    prefill_only: bool = False
    transfer: int | None = None
    first_block: int = 0
    grant: Hashable | None = None
    awaits: set[Awaits] = field(default_factory=set)
    state: State = State.WAITING
    place: Place = (True, 0, True, 0, 0)
    behind: Request | None = None
    held_for_transfer: bool = False
    token_ids: list[int] = field(default_factory=list)
    computed_len: int = 0
    cached_len: int | None = None
    fetched: tuple[tuple[int, int], ...] = ()
    missed: Missed = ()
    block_ids: list[int] = field(default_factory=list)
    state_rows: StateRows | None = None
    windows: WindowBlocks | None = None
    state_blocks: list[int] = field(default_factory=list)
    pause_at: int | None = None
    hashes: list[bytes] = field(default_factory=list)
    registered: int = 0
    replacements: int = 0
    written: int = 0
    shipped: int = 0
    copied: int | None = None
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    arrived: float = field(default_factory=time.monotonic)
    queued: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    lacking: int = 0
    sample_row: SampleRow | None = None
    drafts: NgramDrafts | None = None
    pooled: torch.Tensor | None = None
    generates: bool = True
    adapter: Adapter | None = None
    media: RequestMedia | None = None
    cache_use: CacheUse = field(init=False)

    def __post_init__(self) -> None:
        self.generates = isinstance(self.job.work, Generate)
        job = self.job
        self.cache_use = CacheUse(job.namespace, job.session[:MAX_NAME], job.request_id, job.retention[:MAX_NAME])
        self.token_ids = list(self.job.token_ids)
        self.media = RequestMedia(job, self.block_size) if job.media else None
        self.extend_hashes()

    @property
    def key(self) -> Key:
        """Return (request id, attempt)."""
        return key_of(self.job)

    @property
    def holder(self) -> tuple[Hashable, str]:
        """Owner of the holds on its blocks, and their reason."""
        return (self.key, REQUEST) if self.grant is None else (self.grant, GRANT)

    @property
    def uncomputed(self) -> int:
        """Return the tokens without K/V."""
        return len(self.token_ids) - self.computed_len

    @property
    def decodes(self) -> bool:
        """Return whether one token is left to compute: the request is then a stream, and its next step a decode."""
        return self.uncomputed == 1

    @property
    def output_len(self) -> int:
        """Output tokens so far; above 0, its client waits in the middle of a stream."""
        return len(self.token_ids) - self.job.prompt_len

    @property
    def output_here(self) -> int:
        """Output tokens drawn since it came here or was handed over to this node."""
        return len(self.token_ids) - len(self.job.token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Return whether prompt log-probabilities are requested."""
        return self.generates and self.job.work.whole_prompt and self.output_len == 0

    @property
    def reusable_hashes(self) -> list[bytes]:
        """Hashes of the blocks that may come from the cache; at least one token is always computed."""
        if self.job.work.whole_prompt and self.output_len == 0:
            return []
        return self.hashes[: self.last_start // self.block_size]

    @property
    def last_start(self) -> int:
        """Return where the block of the last token begins."""
        return (len(self.token_ids) - 1) // self.block_size * self.block_size

    def parent_of(self, start: int) -> bytes:
        """Return the key of partial blocks that begin at `start`: the hash of the block before, and media in them."""
        parent = self.hashes[start // self.block_size - 1] if start else self.root
        return self.media.part_of(parent, start) if self.media is not None else parent

    def extend_hashes(self) -> None:
        """Hash blocks that have become full."""
        if len(self.token_ids) // self.block_size > len(self.hashes):
            extras = self.media.extras if self.media is not None else NO_EXTRAS
            self.hashes = chain(self.root, self.token_ids, self.block_size, self.hashes, extras)

    def move(self, new: State) -> None:
        """Change to a state that MOVES allows."""
        assert new in MOVES[self.state], f"{self.key}: {self.state} → {new} is not allowed"
        self.state = new


def held_blocks(request: Request) -> list[int]:
    """Return all blocks that a transfer holds, in order: those of the chain, then those of its state or pages."""
    return [*request.block_ids, *request.state_blocks] if request.state_blocks else request.block_ids


def held_up(request: Request) -> bool:
    """Return whether it must not run now: its grammar mask is not made, or it waits for the end of its migration."""
    row = request.sample_row
    if request.pause_at is not None and request.computed_len >= request.pause_at:
        return True
    return row is not None and row.mask is not None and row.mask.blocks


def resumed(request: Request) -> bool:
    """Return whether the request began at another node."""
    return len(request.job.token_ids) > request.job.prompt_len


def coming(request: Request, computing: Iterable[Request]) -> bool:
    """Return whether one of the prompts being computed is at a block that this one will reuse."""
    hashes, size = request.hashes, len(request.reusable_hashes)
    return any(
        other.registered < size and hashes[other.registered] in other.hashes[other.registered : other.registered + 1]
        for other in computing
    )


def grows(request: Request) -> bool:
    """Return whether it will need blocks for output."""
    return request.generates and not request.prefill_only


def to_compute(request: Request) -> int:
    """Return the tokens that it will compute here, as far as known while it is queued.

    A prompt that arrives by a grant is computed elsewhere."""
    return request.lacking if request.grant is None else 0


def preemption_key(request: Request) -> tuple[bool, bool, float]:
    """Sort key of preemption, greatest first. A stream's rank only rises, so the most senior always makes progress."""
    return (not request.output_len, not resumed(request), request.arrived)

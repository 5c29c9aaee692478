"""Draft model for speculative decoding: follows streams in a block pool of its own and draws their next tokens.

It is a small model with the streams' vocabulary. It keeps a shadow request for every stream that it follows: the
stream's tokens, then the tokens it drew after them. It draws with the stream's parameters and with the noise of the
same positions, so it draws the stream's own tokens wherever both models nearly agree (speculative decoding: Leviathan
et al., arXiv 2211.17192; but here a draft is right only if it equals the token that is drawn)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.draft_states import DraftRows, DraftStates
from kvferry.engine.prefix_registration import make_findable
from kvferry.engine.request import Key, Request
from kvferry.engine.request_table import RequestTable
from kvferry.engine.runner import Runner
from kvferry.engine.sample_rows import Outcome
from kvferry.engine.sampler import Sampled
from kvferry.engine.shared_cores.core_turns import CoreTurns
from kvferry.engine.step_cost import StepCost
from kvferry.engine.step_slices import Slice, chunks_of
from kvferry.kernels.decoder_step import always
from kvferry.protocol.layout import blocks_for
from kvferry.protocol.work import Generate

MAX_CATCH_UP = 4
"""Maximum number of tokens that are computed as rows of a decode step, which is faster than as a chunk."""
LEARN = 0.3
"""Weight of the newest chunk in the average time."""


@dataclass(slots=True, eq=False)
class DraftState:
    """Draft model's state of one stream.

    known: number of its request's tokens that are the stream's; the rest was drawn here. fits: the draft model's
    vocabulary has all of them. rows: of its recurrent states, which are its request's `state_rows`, too."""

    request: Request
    rows: DraftRows | None = None
    known: int = 0
    fits: bool = True

    def follow(self, stream: Request) -> list[int]:
        """Take over the stream's tokens from the first difference on, and return those.

        Everything computed after that is forgotten."""
        own, tokens, same = self.request.token_ids, stream.token_ids, self.known
        while same < min(len(own), len(tokens)) and own[same] == tokens[same]:
            same += 1
        new = tokens[same:]
        own[same:] = new
        self.known = len(tokens)
        self.request.computed_len = min(self.request.computed_len, same, self.known - 1)
        if self.rows is not None:
            self.request.computed_len = self.rows.rewind(self.request.computed_len)
        self.request.hashes = stream.hashes
        return new


class DraftModel:
    """Draft model of one engine, on the engine's thread.

    chunk: limit of tokens to catch up in a step. vocab_size: number of ids that streams can have. core_turns: its turns
    to compute (its runner has no turns of its own). cost: seconds of its decode steps. token_s: seconds per token of
    a chunk. waited_s: seconds it waited for the cores in the last `draft`."""

    def __init__(self, runner: Runner, pool: BlockPool, chunk: int, vocab_size: int, core_turns: CoreTurns) -> None:
        self._states = None if runner.states is None else DraftStates(len(runner.states.rows))
        self.cost = StepCost()
        self.token_s = self.waited_s = 0.0
        self.runner, self.pool = runner, pool
        self._chunk, self._core_turns = chunk, core_turns
        info = runner.model.info
        self._longest, self._ids, self._vocab = info.max_model_len, info.vocab_size, min(info.vocab_size, vocab_size)
        self._shadows: dict[Key, DraftState] = {}

    def can(self, stream: Request) -> bool:
        """Return whether the stream may have a draft: it is short enough, and the draft model has its tokens."""
        shadow = self._shadows.get(stream.key)
        return len(stream.token_ids) < self._longest and (shadow is None or shadow.fits)

    def lack(self, stream: Request) -> int:
        """Return tokens of the stream that are to be computed before the first draft."""
        shadow = self._shadows.get(stream.key)
        return len(stream.token_ids) - (min(shadow.request.computed_len, shadow.known) if shadow else 0)

    def draft(self, drafting: Sequence[tuple[Request, int]]) -> list[tuple[int, ...]]:
        """Draft tokens for each (stream, maximum number), one pass per position over all streams.

        A stream gets none without space for it, or if more of it must be computed than a step may take."""
        shadows = [self._shadow(stream, count) for stream, count in drafting]
        counts = [(shadow, count) for shadow, (_, count) in zip(shadows, drafting, strict=True) if shadow is not None]
        self.waited_s = 0.0
        if not counts:
            return [()] * len(drafting)
        with self._core_turns.computing(always, whole=True):
            self._run(self._uncomputed([shadow.request for shadow, _ in counts]))
            for place in range(1, max(count for _, count in counts)):
                ready = [s.request for s, count in counts if count > place == len(s.request.token_ids) - s.known]
                self._run([Slice(request, request.computed_len, 1) for request in ready])
        self.waited_s = self._core_turns.waited_s
        return [tuple(s.request.token_ids[s.known :]) if s is not None else () for s in shadows]

    def forget(self, stream: Request) -> None:
        """Drop the stream. Its computed blocks may be found again until they are evicted."""
        shadow = self._shadows.pop(stream.key, None)
        if shadow is None:
            return
        shadow.follow(stream)
        self._register(shadow.request)
        self._release(shadow)

    def forget_all(self) -> None:
        """Drop all streams."""
        for shadow in self._shadows.values():
            self._release(shadow)
        self._shadows.clear()

    def audit(self, request_table: RequestTable) -> Iterator[None]:
        """Assert that the counts agree and that it follows only present requests; in pieces below a millisecond."""
        yield from self.pool.audit()
        assert all(request_table.find(key) for key in self._shadows), "the draft model holds streams that have ended"
        held = {block for shadow in self._shadows.values() for block in shadow.request.block_ids}
        assert self.pool.holds.num_held == len(held), "blocks of the draft model leaked"
        if self._states is not None:
            self._states.check(shadow.rows for shadow in self._shadows.values() if shadow.rows is not None)

    def _shadow(self, stream: Request, count: int) -> DraftState | None:
        """Return the stream's shadow as of now, with room for `count` drafts; None where it can have none."""
        shadow = self._shadows.get(stream.key)
        new = stream.token_ids if shadow is None else shadow.follow(stream)
        if shadow is None:
            shadow = self._shadows[stream.key] = self._open(stream)
        shadow.fits &= max(new, default=0) < self._ids
        request, upto = shadow.request, shadow.known + count - 1
        if not shadow.fits or upto > self._longest:
            return None
        missing = blocks_for(upto, request.block_size) - len(request.block_ids)
        if missing > 0:
            more = self.pool.acquire(*request.holder, [], missing)
            if more is None:
                return None
            request.block_ids.extend(more)
        near = request.uncomputed if request.uncomputed <= MAX_CATCH_UP else 1
        if shadow.rows is not None and not shadow.rows.reserve(near + count - 1):
            return None
        return shadow

    def _open(self, stream: Request) -> DraftState:
        """Open a stream's state, reusing its cached prefix: its prompt may begin like another one.

        States of recurrent layers have no checkpoints here, so with them nothing is reused."""
        params = replace(stream.job.params, logprobs=None)
        job = replace(stream.job, token_ids=(), media=(), work=Generate(params))
        shadow = DraftState(Request(job, stream.root, stream.block_size))
        request = shadow.request
        if self._states is not None:
            shadow.rows = request.state_rows = self._states.open()
        shadow.follow(stream)
        found = self.pool.match(request.reusable_hashes) if self._states is None else []
        request.block_ids = self.pool.acquire(*request.holder, found, 0) or []
        request.registered = len(request.block_ids)
        request.computed_len = request.registered * request.block_size
        return shadow

    def _uncomputed(self, requests: Sequence[Request]) -> list[Slice]:
        """Return slices to compute before the first drafts: up to MAX_CATCH_UP tokens, or a chunk of more."""
        near = [request for request in requests if request.uncomputed <= MAX_CATCH_UP]
        rows = [Slice(request, at, 1) for request in near for at in range(request.computed_len, len(request.token_ids))]
        distant = sorted((r for r in requests if r.uncomputed > MAX_CATCH_UP), key=lambda request: request.uncomputed)
        return rows + sorted(chunks_of(distant, self._chunk), key=lambda part: not part.decodes)

    def _run(self, slices: Sequence[Slice]) -> None:
        """Compute them, and draw behind those that end with their request's last token."""
        if not slices:
            return
        began = time.monotonic()
        found = self.runner.run(slices)
        seconds = time.monotonic() - began
        if slices[-1].decodes:
            self.cost.observe(len(slices), seconds)
        else:
            self.token_s += (LEARN if self.token_s else 1.0) * (seconds / sum(s.count for s in slices) - self.token_s)
        for part, drawn in zip(slices, found, strict=True):
            self._commit(part, drawn)

    def _commit(self, part: Slice, drawn: Outcome) -> None:
        request = part.request
        request.computed_len += part.count
        if isinstance(request.state_rows, DraftRows):
            request.state_rows.record(part.count)
        if not part.decodes:
            self._register(request)
        if isinstance(drawn, Sampled) and 0 <= drawn.token_id < self._vocab:
            request.token_ids.append(drawn.token_id)

    def _release(self, shadow: DraftState) -> None:
        """Release its blocks and rows."""
        self.pool.release(*shadow.request.holder, shadow.request.block_ids)
        if shadow.rows is not None:
            shadow.rows.free()

    def _register(self, request: Request) -> None:
        """Make the request's full blocks findable.

        Not between two decode steps, whose plan is kept: a block may be replaced by an equal one. Without a state
        they would not be of use."""
        if self._states is not None:
            return
        full = min(request.computed_len // request.block_size, len(request.hashes))
        make_findable(self.pool, request, full, [request.holder])
        self.pool.changes.drain()

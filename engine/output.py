"""Turns a sampled token or a pooled vector into an output event: stop conditions, finish reason, and reuse figures."""

from __future__ import annotations

import time
from dataclasses import replace

from kvferry.engine.events import Generated
from kvferry.engine.request import Request
from kvferry.engine.sampler import Sampled
from kvferry.protocol.errors import GrammarFailed, KvferryError, ModelFailed
from kvferry.protocol.messages import TokenDelta
from kvferry.protocol.prefix_reuse import Reuse


def append(request: Request, sampled: Sampled, longest: int) -> Generated:
    """Append the token to the request and return the event. longest: length at which a sequence ends, in tokens."""
    params = request.job.params
    index = request.output_len
    request.token_ids.append(sampled.token_id)
    ends = params.ending_token_ids if request.job.grammar is None else params.eos_token_ids + params.stop_token_ids
    ended = sampled.token_id in ends
    row = request.sample_row
    full = request.output_len >= params.max_tokens or len(request.token_ids) >= longest
    closed = row is not None and row.mask is not None and row.mask.closing
    delta = TokenDelta(
        request.job.request_id,
        request.job.attempt,
        index,
        (sampled.token_id,),
        logprobs=None if sampled.logprobs is None else (sampled.logprobs,),
        finish_reason=("closed" if closed else "stop") if ended else "length" if full else None,
        stop_token=sampled.token_id if ended else None,
    )
    handover = request.transfer if delta.finish_reason is None else None
    event = Generated(request.key, request.job.router_id, delta, handover=handover)
    return _first(request, event) if request.output_here == 1 else event


def read(request: Request, vector: bytes) -> Generated:
    """Return the event of a request that generates nothing: its only output, a vector."""
    delta = TokenDelta(*request.key, 0, (), finish_reason="stop", vector=vector)
    return _first(request, Generated(request.key, request.job.router_id, delta))


def _first(request: Request, event: Generated) -> Generated:
    """Add the prompt's reuse, its log-probabilities and the times to the request's first output on this node."""
    prompt_len, cached, fetched = len(request.job.token_ids), request.cached_len or 0, _fetched_len(request)
    found = {"reused_prefill" if request.prefill_only else "reused_decode": cached - fetched}
    written = min(request.written * request.block_size, prompt_len - cached)
    computed, missed = prompt_len - cached, request.missed
    reuse = Reuse(prompt_len, fetched=fetched, computed=computed, missed=missed, written=written, **found)
    delta = replace(event.delta, reuse=reuse, prompt_logprobs=tuple(request.prompt_logprobs) or None)
    admitted = request.admitted or request.arrived
    return replace(event, delta=delta, queue_s=admitted - request.arrived, compute_s=time.monotonic() - admitted)


def _fetched_len(request: Request) -> int:
    """Return how many tokens found in the cache were fetched from another node for it; each block counts once."""
    cached, size = request.cached_len or 0, request.block_size
    landed = {block for first, end in request.fetched for block in range(first, end)}
    return sum(min(size, max(0, cached - block * size)) for block in landed)


def nothing_drawn(request: Request) -> KvferryError:
    """Return the error of a request for which no token could be drawn."""
    if request.job.grammar is not None:
        return GrammarFailed("no token that the grammar allows can be drawn, or its logits are NaN")
    return ModelFailed("the model's logits for the next token are NaN")

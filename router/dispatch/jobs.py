"""Builds a node's Job message and (for placement) block hashes of a request; turns token deltas into outputs."""

from __future__ import annotations

from dataclasses import replace

from kvferry.placement.types import Placement
from kvferry.protocol.hashing import NO_EXTRAS, chain, root_hash
from kvferry.protocol.media import block_extras
from kvferry.protocol.messages import Job, TokenDelta
from kvferry.protocol.work import Generate, Work
from kvferry.router.dispatch.interface import Output, RequestSpec
from kvferry.router.nodes.model_nodes import FingerprintGroup


def job(
    spec: RequestSpec, request_id: str, attempt: int, delivered: tuple[int, ...], router_id: str, left_s: float,
    placement: Placement, failures: int = 0,
) -> Job:  # fmt: skip
    """Build the job of one attempt on chosen nodes, which continues after the delivered output tokens."""
    computes = placement.prefill or placement.decode
    return Job(
        request_id=request_id,
        attempt=attempt,
        token_ids=spec.token_ids + delivered,
        prompt_len=len(spec.token_ids),
        work=_later(spec.work) if delivered else spec.work,
        router_id=router_id,
        namespace=spec.namespace,
        trace=spec.call.trace,
        deadline_s=left_s,
        fork_of=spec.fork_of.request_id if spec.fork_of else "",
        adapter=spec.adapter,
        newcomer=spec.newcomer and not delivered,
        predicted=(placement.cached_len, computes.epoch) if computes else (0, 0),
        holder=placement.holder,
        media=spec.media.items if spec.media else (),
        rope_offset=spec.media.rope_offset if spec.media else 0,
        failures=failures,
        session=spec.session,
        retention=spec.retention,
    )


def hashes(spec: RequestSpec, token_ids: tuple[int, ...], group: FingerprintGroup) -> list[bytes]:
    """Return the block hashes of prompt and delivered tokens on a group's nodes; empty if nothing can be reused."""
    if spec.work.whole_prompt and len(token_ids) == len(spec.token_ids):
        return []
    root, size = root_hash(group.fingerprint, spec.namespace, spec.adapter), group.block_size
    return chain(root, token_ids, size, extras=block_extras(spec.media.items, size) if spec.media else NO_EXTRAS)


def output(delta: TokenDelta) -> Output:
    """Translate a token delta into an output."""
    return Output(
        delta.token_ids,
        delta.logprobs,
        delta.finish_reason,
        delta.stop_token,
        delta.prompt_logprobs,
        delta.vector,
    )


def _later(work: Work) -> Work:
    """Return the work of an attempt after the first output: without prompt_logprobs, which are already delivered."""
    return replace(work, params=replace(work.params, prompt_logprobs=None)) if isinstance(work, Generate) else work

"""Check that a prompt's account of reused and computed tokens adds up, before its first token leaves the node."""

from __future__ import annotations

import logging

from kvferry.protocol.messages import TokenDelta
from kvferry.protocol.worker_metrics import WorkerMetrics

log = logging.getLogger("kvferry.worker")


def audit(delta: TokenDelta, metrics: WorkerMetrics, prompt_len: int | None = None) -> None:
    """Log and count a first delta whose reuse account does not add up.

    prompt_len: total of the account in tokens, if known. The delta is sent anyway, because its tokens are right."""
    reuse = delta.reuse
    if reuse is None or (reuse.balanced and prompt_len in (None, reuse.prompt_len)):
        return
    metrics.account_violations.inc()
    log.error("reuse accounting of attempt %d of %s is wrong: %s", delta.attempt, delta.request_id, reuse)

"""Consistency check of reuse accounts before they leave the node."""

from __future__ import annotations

import logging

from kvferry.protocol.messages import TokenDelta
from kvferry.protocol.worker_metrics import WorkerMetrics

log = logging.getLogger("kvferry.worker")


def audit(delta: TokenDelta, metrics: WorkerMetrics, prompt_len: int | None = None) -> None:
    """Log and count the account of a first delta, if it has one, unless it adds up, to `prompt_len` (tokens) where that
    is known. The tokens are right whatever the account says, so the delta goes out."""
    reuse = delta.reuse
    if reuse is None or (reuse.balanced and prompt_len in (None, reuse.prompt_len)):
        return
    metrics.account_violations.inc()
    log.error("the account of attempt %d of %s is wrong: %s", delta.attempt, delta.request_id, reuse)

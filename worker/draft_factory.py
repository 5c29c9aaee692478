"""Construction of an engine's draft model with its own KV pool, for speculative decoding, from settings."""

from __future__ import annotations

import logging

import torch

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.draft_model import MAX_CATCH_UP, DraftModel
from kvferry.engine.ledger import Ledger
from kvferry.engine.models.base import Model
from kvferry.engine.runner import Runner
from kvferry.engine.scheduler import max_running
from kvferry.engine.shared_cores.core_turns import CoreTurns
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.layout import KVLayout
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker.pool_memory import make_pool
from kvferry.worker.recurrent_states import DRAFTING, ROWS_SHARE, make_states, rows_bytes

log = logging.getLogger("kvferry.worker")

GIB = 1024**3


def draft_rows(model: Model | None, settings: WorkerSettings, available: float) -> int:
    """Return how many rows of recurrent states the draft model has; 0 without a draft model or recurrent layers.

    A stream keeps one row, and one for each draft until it is known whether it was right. available: free memory in
    bytes; states take at most `ROWS_SHARE` of it. Raises ConfigError if not even one stream's fit."""
    if model is None or not model.info.state_floats:
        return 0
    drafting = 1 + MAX_CATCH_UP + settings.num_speculative_tokens
    room = int(ROWS_SHARE * available // rows_bytes(model.info, 1))
    if room < drafting:
        raise ConfigError(
            f"one stream's states of {model.info.name} take {rows_bytes(model.info, drafting)} bytes, more than memory "
            "has room for; use a smaller draft model",
            param="speculative_model",
        )
    return min(room, max_running(settings.max_num_seqs) + DRAFTING * drafting)


def draft_layout(model: Model | None, block_size: int, kv_dtype: torch.dtype | None) -> KVLayout | None:
    """Return the layout of the draft model's KV blocks; None without a draft model.

    kv_dtype: None for the model's own."""
    return model.info.layout(kv_dtype or model.dtype, block_size) if model is not None else None


def make_draft(
    model: Model | None,
    layout: KVLayout | None,
    num_blocks: int,
    *,
    state_rows: int,
    prefix_caching: bool,
    chunk: int,
    vocab_size: int,
    core_turns: CoreTurns | None,
) -> DraftModel | None:
    """Build the draft model with its own KV pool; None without a draft model. state_rows: see `draft_rows`.

    The pool has as many blocks as the target model's, so it holds the same tokens."""
    if model is None or layout is None:
        return None
    kv = make_pool(layout, num_blocks, model.device)
    runner = Runner(model, kv, layout.block_size, states=make_states(model.info, state_rows, kv, model.device))
    log.info("draft model %s, %.2f GiB of KV blocks", model.info.name, num_blocks * layout.block_bytes / GIB)
    pool = BlockPool(num_blocks, Ledger(num_blocks), prefix_caching=prefix_caching)
    return DraftModel(runner, pool, chunk, vocab_size, core_turns or CoreTurns())

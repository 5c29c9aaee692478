"""Construction of an engine's draft model with its own KV pool, for speculative decoding, from settings."""

from __future__ import annotations

import logging

import torch

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.draft_model import DraftModel
from kvferry.engine.ledger import Ledger
from kvferry.engine.models.base import Model, ModelInfo
from kvferry.engine.runner import Runner
from kvferry.engine.shared_cores.core_turns import CoreTurns
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.layout import KVLayout
from kvferry.worker.pool_memory import make_pool

log = logging.getLogger("kvferry.worker")

GIB = 1024**3


def able_to_draft(draft: Model | None, target: ModelInfo) -> Model | None:
    """Return the draft model; None if it has recurrent layers, as its target has.

    Its states cannot take a token back, but a target like this still has drafts of n-grams. Raises ConfigError beside
    a target without such layers."""
    if draft is None or not draft.info.state_floats:
        return draft
    if not target.state_floats:
        raise ConfigError(
            f"{draft.info.name} has recurrent layers, which a draft model must not have: they cannot take a token back",
            param="speculative_model",
        )
    log.warning("%s has recurrent layers, so it drafts nothing", draft.info.name)
    return None


def draft_layout(model: Model | None, block_size: int, kv_dtype: torch.dtype | None) -> KVLayout | None:
    """Return the layout of the draft model's KV blocks; None without a draft model.

    kv_dtype: None for the model's own."""
    return model.info.layout(kv_dtype or model.dtype, block_size) if model is not None else None


def make_draft(
    model: Model | None,
    layout: KVLayout | None,
    num_blocks: int,
    *,
    prefix_caching: bool,
    chunk: int,
    vocab_size: int,
    core_turns: CoreTurns | None,
) -> DraftModel | None:
    """Build the draft model with its own KV pool; None without a draft model.

    The pool has as many blocks as the target model's, so it holds the same tokens."""
    if model is None or layout is None:
        return None
    runner = Runner(model, make_pool(layout, num_blocks, model.device), layout.block_size)
    log.info("draft model %s, %.2f GiB of KV blocks", model.info.name, num_blocks * layout.block_bytes / GIB)
    pool = BlockPool(num_blocks, Ledger(num_blocks), prefix_caching=prefix_caching)
    return DraftModel(runner, pool, chunk, vocab_size, core_turns or CoreTurns())

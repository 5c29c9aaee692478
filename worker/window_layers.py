"""Decides whether layers with sliding windows get KV blocks of their own, and computes what the pool then holds."""

from __future__ import annotations

from kvferry.engine.budget import Limits
from kvferry.engine.models.base import Model
from kvferry.engine.models.layer_lifetimes import divide_layers
from kvferry.engine.window_pages import PageShares
from kvferry.protocol.layout import KVLayout
from kvferry.protocol.settings import WorkerSettings


def divides(settings: WorkerSettings) -> bool:
    """Return whether the settings let layers with windows have blocks of their own.

    Ranks, draft models, canary checks and the shared store support only one kind of block. All nodes that exchange
    blocks need the same answer, so it does not depend on their roles."""
    return not (
        settings.tensor_parallel_size > 1
        or settings.speculative_model
        or settings.canary_rate
        or settings.kv_remote_url
    )


def divide(settings: WorkerSettings, model: Model) -> None:
    """Give the model's layers with windows blocks of their own, if settings and model allow."""
    if divides(settings):
        divide_layers(model)


def longest_chain(layout: KVLayout, num_blocks: int, limits: Limits) -> int:
    """Return the number of blocks of the longest chain that fits in a pool, together with its windows' pages if any."""
    if layout.groups is None:
        return num_blocks
    return PageShares(layout.groups, layout.block_size, limits.max_num_batched_tokens, num_blocks).longest


def pool_tokens(layout: KVLayout, num_blocks: int, max_model_len: int) -> int:
    """Return how many tokens a pool holds, in sequences of `max_model_len` if layers have windows."""
    if layout.groups is None:
        return num_blocks * layout.block_size
    return num_blocks * max_model_len // layout.blocks_for(max_model_len)

"""Memory of recurrent states on a node, and checks of settings that models with recurrent layers do not support."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from kvferry.engine.auxiliary_blocks import AuxiliaryBlocks
from kvferry.engine.canary_state import CHECK_ROWS, CanaryStates
from kvferry.engine.models.base import ModelInfo
from kvferry.engine.prefault import Region
from kvferry.engine.scheduler import max_running
from kvferry.engine.state_checkpoints import StateCheckpoints
from kvferry.engine.state_memory import STATE_DTYPE, StateMemory, blocks_of_state, make_rows
from kvferry.engine.state_rows import ROWS
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.layout import KVLayout
from kvferry.protocol.settings import WorkerSettings

log = logging.getLogger("kvferry.worker")

ROWS_SHARE = 0.25
"""Maximum share of the free memory for states; if it does not suffice for all requests, fewer run at once."""
DRAFTING = 8
"""Streams that can have all drafts at once, in rows of their own and of other requests; more of them hardly pay."""


def require_no_ranks(settings: WorkerSettings, info: ModelInfo) -> None:
    """Raise ConfigError if the model has recurrent layers and several ranks are to compute it."""
    if info.state_floats and settings.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size must be 1 for {info.name}, which has recurrent layers; use several nodes",
            param="tensor_parallel_size",
        )


def count_rows(settings: WorkerSettings, info: ModelInfo, available: float) -> int:
    """Return how many rows of states the node has; 0 for a model without recurrent layers.

    available: free memory in bytes; states take at most `ROWS_SHARE` of it. Raises ConfigError if not even those of one
    request fit."""
    if not info.state_floats:
        return 0
    seats, room = max_running(settings.max_num_seqs), int(ROWS_SHARE * available // rows_bytes(info, 1))
    if room < ROWS:
        each = rows_bytes(info, ROWS)
        raise ConfigError(f"one request's states of {info.name} take {each} bytes, more than memory has room for")
    if room < seats * ROWS:
        log.warning(
            "memory has room for the states of %d requests at once, fewer than --max-num-seqs %d",
            room // ROWS, settings.max_num_seqs,
        )  # fmt: skip
    drafting = min(seats, DRAFTING) * (ROWS + settings.num_speculative_tokens)
    checks = CHECK_ROWS if settings.canary_rate else 0
    return min(room, max(seats * ROWS, drafting) + checks)


def rows_bytes(info: ModelInfo, rows: int) -> int:
    """Return the size of so many rows of states, in bytes."""
    return rows * info.state_floats * STATE_DTYPE.itemsize


def require_room(info: ModelInfo, layout: KVLayout, num_blocks: int) -> int:
    """Return the number of blocks that a state takes, besides those of a sequence.

    Raises ConfigError if the pool has no room for both."""
    blocks = blocks_of_state(info.state_floats, layout.block_bytes)
    if blocks and num_blocks < blocks + 2:
        raise ConfigError(
            f"the KV pool has room for {num_blocks} blocks, of which a state of {info.name} takes {blocks}; raise "
            "--kv-cache-gib",
            param="kv_cache_gib",
        )
    return blocks


def make_states(info: ModelInfo, rows: int, kv: torch.Tensor, device: torch.device) -> StateMemory | None:
    """Allocate the rows of states; return None if there are none. Raises ConfigError."""
    if not rows:
        return None
    try:
        return StateMemory(make_rows(rows, info.state_floats, device), kv)
    except (OSError, OverflowError, RuntimeError, torch.OutOfMemoryError) as error:
        raise ConfigError("out of memory for recurrent states; lower --max-num-seqs", param="max_num_seqs") from error


def checked_states(checkpoints: AuxiliaryBlocks | None, info: ModelInfo) -> CanaryStates | None:
    """Return the rows for canary checks; None for a model without recurrent layers."""
    if not isinstance(checkpoints, StateCheckpoints):
        return None
    return CanaryStates(checkpoints.row_pool, checkpoints.memory, info.state_parts)


def rows_in_use(checkpoints: AuxiliaryBlocks | None, states: StateMemory | None) -> Iterator[Region]:
    """Yield the rows as memory that running requests use, if the model has recurrent layers."""
    if states is not None and isinstance(checkpoints, StateCheckpoints):
        yield Region(states.rows, checkpoints.rows_used)

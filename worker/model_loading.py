"""Call of `load_model` with a node's settings, for its model, its draft model or a rank's shard."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvferry.engine.models import load_model
from kvferry.engine.models.base import Model
from kvferry.engine.ranks.rank_assignment import RankAssignment
from kvferry.kernels.ops import Ops
from kvferry.model_files.source import ModelSource
from kvferry.protocol.settings import WorkerSettings


def load(
    settings: WorkerSettings,
    source: ModelSource,
    device: torch.device,
    ops: Ops,
    progress: Callable[[float], None] | None = None,
    weights_fd: int = -1,
    part: RankAssignment | None = None,
) -> Model:
    """Load a model with `load_model` and the options of the settings."""
    return load_model(
        source,
        device=device,
        dtype=None if settings.dtype == "auto" else getattr(torch, settings.dtype),
        ops=ops,
        impl=settings.model_impl,
        quantization=settings.quantization,
        load_format=settings.load_format,
        max_model_len=settings.max_model_len,
        progress=progress,
        weights_fd=weights_fd,
        part=part,
    )

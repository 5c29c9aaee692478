"""In which number format a node keeps K and V."""

from __future__ import annotations

import torch

from engine.models.base import Model
from protocol.errors import ConfigError
from protocol.settings import WorkerSettings


def kv_format(settings: WorkerSettings, *models: Model | None) -> torch.dtype | None:
    """None: in that of each model. Raises ConfigError where kernels do not have it for them."""
    if settings.kv_cache_dtype != "int8":
        return None
    for model in models:
        if model is not None and model.info.head_dim % (unit := model.ops.capabilities.int8_heads):
            raise ConfigError(
                f"kv_cache_dtype int8 needs head dims that are multiples of {unit} on {model.ops.name} kernels; those "
                f"of {model.info.name} are {model.info.head_dim}",
                param="kv_cache_dtype",
            )
    return torch.int8

"""Choice of the number format of a node's KV cache, from --kv-cache-dtype and what the kernels support."""

from __future__ import annotations

import torch

from kvferry.engine.models.base import Model
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.layout import cache_format
from kvferry.protocol.settings import WorkerSettings


def kv_format(settings: WorkerSettings, *models: Model | None) -> torch.dtype | None:
    """Return the number format of the KV cache that the settings choose; None: each model's own format.

    Raises ConfigError when the kernels do not support it for a model."""
    name = settings.kv_cache_dtype
    found = cache_format(name, batch_invariant=settings.batch_invariant)
    if found is None:
        return None
    dtype: torch.dtype = getattr(torch, found)
    for model in models:
        if model is None:
            continue
        unit = model.ops.capabilities.unit
        if any(dim % unit for dim in model.info.head_dims):
            dims = " and ".join(map(str, sorted(model.info.head_dims)))
            raise ConfigError(
                f"kv_cache_dtype {name} needs head dims that are multiples of {unit} on {model.ops.name} kernels; "
                f"those of {model.info.name} are {dims}",
                param="kv_cache_dtype",
            )
    return dtype

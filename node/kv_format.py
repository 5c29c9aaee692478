"""In which number format a node keeps K and V."""

from __future__ import annotations

import torch

from engine.models.base import Model
from kernels.quantised_cache import FP8
from protocol.errors import ConfigError
from protocol.layout import CACHE_DTYPES
from protocol.settings import WorkerSettings


def kv_format(settings: WorkerSettings, *models: Model | None) -> torch.dtype | None:
    """None: in that of each model. Raises ConfigError where kernels do not have it for them."""
    name = settings.kv_cache_dtype
    if name not in CACHE_DTYPES:
        return None
    dtype: torch.dtype = getattr(torch, CACHE_DTYPES[name])
    if settings.batch_invariant and dtype == FP8:
        raise ConfigError(
            f"batch_invariant does not go with kv_cache_dtype {name}, which PyTorch reads; use int8 or auto",
            param="kv_cache_dtype",
        )
    for model in models:
        if model is not None and model.info.head_dim % (unit := model.ops.capabilities.unit):
            raise ConfigError(
                f"kv_cache_dtype {name} needs head dims that are multiples of {unit} on {model.ops.name} kernels; "
                f"those of {model.info.name} are {model.info.head_dim}",
                param="kv_cache_dtype",
            )
    return dtype

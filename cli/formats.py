"""Number formats of a worker's weights and KV cache, and their size."""

from __future__ import annotations

from kvferry.model_files.memory_needs import ModelNeeds
from kvferry.model_files.weight_counts import NOWHERE, ON_CPU, ON_GPU
from kvferry.protocol.layout import cache_format
from kvferry.protocol.settings import ServeSettings

_FULL_BYTES = {"auto": 2, "float32": 4, "bfloat16": 2, "float16": 2}


def weight_bytes(settings: ServeSettings, needs: ModelNeeds, device: str) -> float:
    """Bytes of one worker's weights as they will run there."""
    itemsize = _FULL_BYTES[settings.dtype]
    if _quantised(settings, "int8"):
        return needs.memory(itemsize) - needs.dense.bytes(itemsize - 1)
    return needs.memory(itemsize, _stored(settings, device))


def step_bytes(settings: ServeSettings, needs: ModelNeeds, device: str) -> float:
    """Bytes of weights that a step with one token reads there."""
    itemsize = _FULL_BYTES[settings.dtype]
    if _quantised(settings, "int8"):
        return needs.step_bytes(itemsize) - needs.dense.active * (itemsize - 1)
    return needs.step_bytes(itemsize, _stored(settings, device))


def _stored(settings: ServeSettings, device: str) -> str:
    """Where weights run as they are stored."""
    if not _quantised(settings, "auto"):
        return NOWHERE
    return ON_CPU if device == "cpu" else ON_GPU


def _quantised(settings: ServeSettings, how: str) -> bool:
    """Weights run as this value of --quantization says, as they do in bfloat16 alone."""
    return settings.quantization == how and settings.dtype in ("auto", "bfloat16") and settings.kernels != "reference"


def kv_dtype(settings: ServeSettings) -> str:
    """Number format of K and V, as in `KVLayout`. Raises ConfigError as `cache_format`."""
    found = cache_format(settings.kv_cache_dtype, batch_invariant=settings.batch_invariant)
    if found is not None:
        return found
    return "bfloat16" if settings.dtype == "auto" else settings.dtype

"""Number formats of a worker's weights and KV cache on its device, and the bytes that weights take there."""

from __future__ import annotations

from kvferry.model_files.memory_needs import ModelNeeds
from kvferry.model_files.weight_counts import NOWHERE, ON_CPU, ON_GPU
from kvferry.protocol.layout import cache_format
from kvferry.protocol.settings import ServeSettings

_FULL_BYTES = {"auto": 2, "float32": 4, "bfloat16": 2, "float16": 2}


def weight_bytes(settings: ServeSettings, needs: ModelNeeds, device: str) -> float:
    """Return the bytes of one worker's weights in the format in which the device computes with them."""
    itemsize = _FULL_BYTES[settings.dtype]
    if _quantised(settings, "int8"):
        return needs.memory(itemsize) - needs.dense.bytes(itemsize - 1)
    return needs.memory(itemsize, _stored(settings, device))


def step_bytes(settings: ServeSettings, needs: ModelNeeds, device: str) -> float:
    """Return the bytes of weights that a step with one token reads on the device."""
    itemsize = _FULL_BYTES[settings.dtype]
    if _quantised(settings, "int8"):
        return needs.step_bytes(itemsize) - needs.dense.active * (itemsize - 1)
    return needs.step_bytes(itemsize, _stored(settings, device))


def _stored(settings: ServeSettings, device: str) -> str:
    """Return the kind of device on which weights run in their stored format, for the weight counts."""
    if not _quantised(settings, "auto"):
        return NOWHERE
    return ON_CPU if device == "cpu" else ON_GPU


def _quantised(settings: ServeSettings, how: str) -> bool:
    """Return whether --quantization has this value and takes effect, which it does only in bfloat16."""
    return settings.quantization == how and settings.dtype in ("auto", "bfloat16") and settings.kernels != "reference"


def kv_dtype(settings: ServeSettings) -> str:
    """Return the number format of K and V, as in `KVLayout`. Raises ConfigError like `cache_format`."""
    found = cache_format(settings.kv_cache_dtype, batch_invariant=settings.batch_invariant)
    if found is not None:
        return found
    return "bfloat16" if settings.dtype == "auto" else settings.dtype

"""View of one layer's K/V in the pool of KV blocks, whether all layers have the same shape or not."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from kvferry.protocol.layout import CachedLayer

_Place = tuple[int, tuple[int, int, int, int]]
"""First number of a layer's part of a block, and the part's shape."""


def layer_view(kv: torch.Tensor, index: int, layers: tuple[CachedLayer, ...], block_size: int) -> torch.Tensor:
    """Return the layer's [block, plane, kv_head, slot, dim] in the pool `kv`, over the same memory.

    index: among the layers that have a part of a block. layers, and the shape of `kv`: see `KVLayout`."""
    if not layers:
        return kv[:, index]
    first, (planes, heads, slots, width) = _places(layers, block_size, str(kv.dtype).removeprefix("torch."))[index]
    strides = (kv.stride(0), heads * slots * width, slots * width, width, 1)
    return kv.as_strided((len(kv), planes, heads, slots, width), strides, kv.storage_offset() + first)


def layer_views(kv: torch.Tensor, layers: tuple[CachedLayer, ...], block_size: int) -> list[torch.Tensor]:
    """Return `layer_view` of each layer that has a part of a block."""
    count = len(layers) or kv.shape[1]
    return [layer_view(kv, index, layers, block_size) for index in range(count)]


@lru_cache(maxsize=32)
def _places(layers: tuple[CachedLayer, ...], block_size: int, dtype: str) -> tuple[_Place, ...]:
    places, first = [], 0
    for layer in layers:
        shape = layer.shape(block_size, dtype)
        places.append((first, shape))
        first += math.prod(shape)
    return tuple(places)

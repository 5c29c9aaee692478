"""Layout of the KV pool (`KVLayout`), and the fingerprint that two nodes must share to exchange blocks."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace

from kvferry.protocol.errors import ConfigError
from kvferry.protocol.layer_groups import LayerGroups

WIRE_VERSION = 15
"""Version of messages, leases and block format; part of the fingerprint."""
STORE_GROUP = 16
"""Blocks of a chain in one object of the shared store; a group starts at a multiple of it."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
"""Bytes of a number by format."""
CACHE_DTYPES = {"int8": "int8", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
"""8-bit formats by their names in --kv-cache-dtype, which are vLLM's."""
SCALE_BYTES = 4
"""Bytes of the float32 scale behind each vector in an 8-bit format."""


def cache_format(name: str, *, batch_invariant: bool) -> str | None:
    """Return the number format of K and V for a value of --kv-cache-dtype; None: the model's.

    Raises ConfigError if the format would make a token's bits depend on its batch, and `batch_invariant` is set."""
    found = CACHE_DTYPES.get(name)
    if batch_invariant and found == "float8_e4m3fn":
        raise ConfigError(
            f"batch_invariant is not supported with kv_cache_dtype {name}, which PyTorch reads on a CPU; use "
            "int8 or auto",
            param="kv_cache_dtype",
        )
    return found


def blocks_for(tokens: int, block_size: int) -> int:
    """Return the number of blocks that `tokens` tokens fill, the last perhaps in part."""
    return -(-tokens // block_size)


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """Cache shape of one layer: K/V heads, their dim, and planes: 2 for K and V, or 1 for latents."""

    kv_heads: int
    head_dim: int
    planes: int = 2

    def shape(self, block_size: int, dtype: str) -> tuple[int, int, int, int]:
        """Return (planes, K/V heads, slots, numbers and scale of a vector) of a block; dtype as in `KVLayout`."""
        width = self.head_dim + (SCALE_BYTES if dtype in CACHE_DTYPES.values() else 0)
        return (self.planes, self.kv_heads, block_size, width)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the pool `[block, layer, plane, kv_head, slot, dim]`; a block is one contiguous byte range.

    planes: 2 for K and V, or 1 for latents. dtype: a key of DTYPE_BYTES. block_size: tokens (slots) per block. In 8-bit
    formats the bytes of a scale follow each vector of head_dim numbers.

    layers: shapes of the layers where they differ, else empty. The pool is then `[block, number]`: a block holds its
    layers' [plane, kv_head, slot, dim] one after the other, and num_kv_heads, head_dim and planes are those of the
    first. Layers that read another layer's K/V have no part. Raises ConfigError for latents in int8, whose parts have
    too different ranges for one scale.

    groups: of layers that live for different times, or None; num_layers is then that of one group's blocks."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int = 16
    planes: int = 2
    layers: tuple[CachedLayer, ...] = ()
    groups: LayerGroups | None = None

    def __post_init__(self) -> None:
        if self.dtype == "int8" and self.planes == 1:
            raise ConfigError(
                "kv_cache_dtype int8 is not supported for latent attention; use auto or fp8",
                param="kv_cache_dtype",
            )

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Return the shape of one block: (layers, planes, KV heads, slots, numbers and scale of a vector).

        With layers that differ, it is the number of all their numbers."""
        if self.layers:
            return (sum(math.prod(layer.shape(self.block_size, self.dtype)) for layer in self.layers),)
        every = CachedLayer(self.num_kv_heads, self.head_dim, self.planes)
        return (self.num_layers, *every.shape(self.block_size, self.dtype))

    @property
    def numbers(self) -> int:
        """Return the numbers of one block without scales."""
        layers = self.layers or (CachedLayer(self.num_kv_heads, self.head_dim, self.planes),) * self.num_layers
        return self.block_size * sum(layer.planes * layer.kv_heads * layer.head_dim for layer in layers)

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block."""
        return math.prod(self.block_shape) * DTYPE_BYTES[self.dtype]

    @property
    def window_pages(self) -> int:
        """Return the maximum number of pages that a sequence needs; 0 unless layers with windows have own blocks."""
        return self.groups.max_pages(self.block_size) if self.groups is not None else 0

    def of_rank(self, ranks: int) -> KVLayout:
        """Return the layout of the pool of each of `ranks` ranks.

        A rank has an equal share of the heads of each layer and plane. A latent is shared by all heads, so a rank has
        all of it. Layers that differ are not divided: no model with such layers runs on several ranks."""
        assert ranks == 1 or not self.layers, "layers of different shapes on several ranks"
        return self if self.planes == 1 else replace(self, num_kv_heads=self.num_kv_heads // ranks)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that a sequence of `tokens` tokens takes."""
        if self.groups is not None:
            return self.groups.blocks(tokens, self.block_size)
        return blocks_for(tokens, self.block_size)

    def fingerprint(self, model_revision: str, arithmetic: str = "", state_floats: int = 0) -> str:
        """Return the fingerprint, which nodes must share to continue each other's work.

        It is 32 hex digits over model revision, layout, dtype, block size, wire version, arithmetic and the numbers of
        a recurrent state."""
        fields = (
            model_revision,
            arithmetic,
            self.dtype,
            self.num_layers,
            self.planes,
            self.num_kv_heads,
            self.head_dim,
            self.block_size,
            WIRE_VERSION,
            *([f"state {state_floats}"] if state_floats else ()),
            *((each.kv_heads, each.head_dim, each.planes) for each in self.layers),
            *([f"windows {self.groups.windows}"] if self.groups is not None else ()),
        )
        return hashlib.sha256("|".join(map(str, fields)).encode()).hexdigest()[:32]

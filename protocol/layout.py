"""Layout of the KV pool, and the fingerprint that two nodes must share to exchange blocks."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace

from kvferry.protocol.errors import ConfigError

WIRE_VERSION = 9
STORE_GROUP = 16
"""Blocks of a chain that are one object of a store that nodes share; a multiple of them is before the first one."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
CACHE_DTYPES = {"int8": "int8", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
"""Formats of 8 bits by their names in --kv-cache-dtype, which are vLLM's."""
SCALE_BYTES = 4
"""The float32 scale behind each vector of 8 bits."""


def cache_format(name: str, *, batch_invariant: bool) -> str | None:
    """Return the number format of K and V by the value of --kv-cache-dtype; None: the model's.

    Raises ConfigError where a token's bits would depend on its batch, and are not to."""
    found = CACHE_DTYPES.get(name)
    if batch_invariant and found == "float8_e4m3fn":
        raise ConfigError(
            f"batch_invariant does not go with kv_cache_dtype {name}, which PyTorch reads on a CPU; use int8 or auto",
            param="kv_cache_dtype",
        )
    return found


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks of `block_size` that `tokens` tokens fill, the last perhaps in part."""
    return -(-tokens // block_size)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the pool `[block, layer, plane, kv_head, slot, dim]`; a block is one contiguous byte range.

    planes: 2, of K and of V, or 1, of latents of both. dtype is a key of DTYPE_BYTES; block_size is in tokens
    (slots). In 8 bits each vector of head_dim numbers is followed by the bytes of its scale. Raises ConfigError for
    latents in int8, whose parts lie too far apart for one step.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int = 16
    planes: int = 2

    def __post_init__(self) -> None:
        if self.dtype == "int8" and self.planes == 1:
            raise ConfigError(
                "kv_cache_dtype int8 is not for latent attention; use auto or fp8",
                param="kv_cache_dtype",
            )

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        width = self.head_dim + (SCALE_BYTES if self.dtype in CACHE_DTYPES.values() else 0)
        return (self.num_layers, self.planes, self.num_kv_heads, self.block_size, width)

    @property
    def block_bytes(self) -> int:
        return math.prod(self.block_shape) * DTYPE_BYTES[self.dtype]

    def of_rank(self, ranks: int) -> KVLayout:
        """Return the layout of each of so many ranks' own pools.

        A rank has the next few heads of each layer and plane, and all of a latent, which heads share."""
        return self if self.planes == 1 else replace(self, num_kv_heads=self.num_kv_heads // ranks)

    def blocks_for(self, tokens: int) -> int:
        """Blocks needed to hold `tokens` tokens."""
        return blocks_for(tokens, self.block_size)

    def fingerprint(self, model_revision: str, arithmetic: str = "") -> str:
        """32 hex digits over model revision, layout, dtype, block size, wire version and arithmetic: in these nodes
        agree that may continue each other's work."""
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
        )
        return hashlib.sha256("|".join(map(str, fields)).encode()).hexdigest()[:32]

"""Layout of the KV pool, and the fingerprint that two nodes must share to exchange blocks."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace

from kvferry.protocol.errors import ConfigError

WIRE_VERSION = 13
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
class KVLayout:
    """Shape of the pool `[block, layer, plane, kv_head, slot, dim]`; a block is one contiguous byte range.

    planes: 2 for K and V, or 1 for latents. dtype: a key of DTYPE_BYTES. block_size: tokens (slots) per block. In 8-bit
    formats the bytes of a scale follow each vector of head_dim numbers. Raises ConfigError for latents in int8, whose
    parts have too different ranges for one scale."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int = 16
    planes: int = 2

    def __post_init__(self) -> None:
        if self.dtype == "int8" and self.planes == 1:
            raise ConfigError(
                "kv_cache_dtype int8 is not supported for latent attention; use auto or fp8",
                param="kv_cache_dtype",
            )

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """Return the shape of one block: (layers, planes, KV heads, slots, numbers and scale of a vector)."""
        width = self.head_dim + (SCALE_BYTES if self.dtype in CACHE_DTYPES.values() else 0)
        return (self.num_layers, self.planes, self.num_kv_heads, self.block_size, width)

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block."""
        return math.prod(self.block_shape) * DTYPE_BYTES[self.dtype]

    def of_rank(self, ranks: int) -> KVLayout:
        """Return the layout of the pool of each of `ranks` ranks.

        A rank has an equal share of the heads of each layer and plane. A latent is shared by all heads, so a rank has
        all of it."""
        return self if self.planes == 1 else replace(self, num_kv_heads=self.num_kv_heads // ranks)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks needed to hold `tokens` tokens."""
        return blocks_for(tokens, self.block_size)

    def fingerprint(self, model_revision: str, arithmetic: str = "") -> str:
        """Return the fingerprint, which nodes must share to continue each other's work.

        It is 32 hex digits over model revision, layout, dtype, block size, wire version and arithmetic."""
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

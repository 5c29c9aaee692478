"""The layout of the KV pool and the fingerprint that two nodes must share before blocks travel between them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

WIRE_VERSION = 1
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the pool `[block, layer, 2, kv_head, slot, dim]`; a block is one contiguous byte range.

    dtype is one of float32, bfloat16, float16; block_size is in tokens (slots).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int = 16

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        layers, two, heads, slots, dim = self.block_shape
        return layers * two * heads * slots * dim * DTYPE_BYTES[self.dtype]

    def blocks_for(self, tokens: int) -> int:
        """Blocks needed to hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def fingerprint(self, model_revision: str) -> str:
        """32 hex digits over model revision, dtype, layout, block size and wire version."""
        fields = (
            model_revision,
            self.dtype,
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            self.block_size,
            WIRE_VERSION,
        )
        return hashlib.sha256("|".join(map(str, fields)).encode()).hexdigest()[:32]

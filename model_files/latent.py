"""Sizes of multi-head latent attention from a DeepSeek config.json (see `kernels.latent`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvferry.model_files.config_fields import whole


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """rank: of what K and V of all heads are made of; query_rank: of what queries are, 0: of the layer's input itself.

    rotated, plain: dims of a query head that turn with its position, and those that do not; value: of what a head puts
    out. interleaved: rotation pairs neighbours in checkpoints."""

    rank: int
    query_rank: int
    rotated: int
    plain: int
    value: int
    interleaved: bool

    @property
    def cached(self) -> int:
        """Numbers that are kept of a token in each layer."""
        return self.rotated + self.rank

    @property
    def head_dim(self) -> int:
        """Return the dimension of a query head."""
        return self.rotated + self.plain

    def weights(self, hidden: int, heads: int) -> int:
        """Return the number of weights of a layer's attention."""
        queries = heads * self.head_dim
        of_queries = self.query_rank * (hidden + queries) if self.query_rank else hidden * queries
        return of_queries + hidden * self.cached + heads * (self.rank * (self.plain + self.value) + self.value * hidden)


def latent_sizes(config: dict[str, Any]) -> LatentSizes:
    """Raises ConfigError, or KeyError where a field is missing."""
    return LatentSizes(
        rank=whole(config, "kv_lora_rank"),
        query_rank=whole(config, "q_lora_rank") if config.get("q_lora_rank") is not None else 0,
        rotated=whole(config, "qk_rope_head_dim"),
        plain=whole(config, "qk_nope_head_dim"),
        value=whole(config, "v_head_dim"),
        interleaved=bool(config.get("rope_interleave", True)),
    )

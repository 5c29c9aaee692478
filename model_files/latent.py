"""Sizes of multi-head latent attention from a DeepSeek config.json (see `kernels.latent`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvferry.model_files.config_fields import whole


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Sizes of one layer's latent attention.

    rank: width of the latent from which K and V of all heads are computed. query_rank: the same for queries; 0 if they
    are computed from the layer's input. rotated, plain: dimensions of a query head with and without rotary embedding.
    value: width of a head's output. interleaved: in checkpoints the rotation pairs neighbours."""

    rank: int
    query_rank: int
    rotated: int
    plain: int
    value: int
    interleaved: bool

    @property
    def cached(self) -> int:
        """Return numbers that are kept of a token in each layer."""
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
    """Return the sizes in a config. Raises ConfigError, or KeyError if a field is missing."""
    return LatentSizes(
        rank=whole(config, "kv_lora_rank"),
        query_rank=whole(config, "q_lora_rank") if config.get("q_lora_rank") is not None else 0,
        rotated=whole(config, "qk_rope_head_dim"),
        plain=whole(config, "qk_nope_head_dim"),
        value=whole(config, "v_head_dim"),
        interleaved=bool(config.get("rope_interleave", True)),
    )

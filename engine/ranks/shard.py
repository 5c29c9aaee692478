"""Which part of a decoder a rank has (Shoeybi et al. 2019): of attention its K/V heads and the query heads that read
them, of an MLP and of each expert a part of its width, of the vocabulary a run of words; of norms and routers all."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.models.config import DecoderConfig
from protocol.errors import ConfigError

FLAG = "tensor_parallel_size"


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of `rank`, one of so many."""

    rank: int
    ranks: int

    def of(self, config: DecoderConfig) -> DecoderConfig:
        """What the rank itself computes: a decoder of fewer heads, a narrower MLP and fewer words, of which the last
        rank's may be nobody's. Raises ConfigError naming what cannot be divided."""
        if config.latent is not None:
            raise ConfigError(
                f"{FLAG} {self.ranks}: the heads of {config.model_type} share one cached vector", param=FLAG
            )
        if config.family.wide_qk_norm:
            raise ConfigError(f"{FLAG} {self.ranks}: {config.model_type} has norms that go over all heads", param=FLAG)
        experts = config.experts and replace(config.experts, size=self._part(config.experts.size, "width of an expert"))
        dense = experts is None or not all(experts.layers)
        return replace(
            config,
            num_kv_heads=self._part(config.num_kv_heads, "K/V heads"),
            num_heads=self._part(config.num_heads, "query heads"),
            intermediate_size=self._part(config.intermediate_size, "width of the MLP") if dense else 0,
            vocab_size=self.words(config.vocab_size),
            experts=experts,
        )

    def words(self, vocab_size: int) -> int:
        """Of a vocabulary, those of each rank."""
        return -(-vocab_size // self.ranks)

    def _part(self, whole: int, what: str) -> int:
        if whole % self.ranks:
            raise ConfigError(f"{FLAG} {self.ranks} does not divide the model's {what}: {whole}", param=FLAG)
        return whole // self.ranks

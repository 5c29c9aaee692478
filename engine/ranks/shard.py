"""Shard: one rank's part of a tensor-parallel decoder: fewer heads and words, a narrower MLP, or some experts.

Tensor parallelism: Shoeybi et al. 2019. A rank has some K/V heads with the query heads that read them, a part of the
width of each MLP and expert, and a run of the vocabulary. Norms, routers and the latents that heads share are on every
rank. With expert parallelism (Lepikhin et al. 2020) a rank has some experts whole."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvferry.engine.models.config import DecoderConfig
from kvferry.engine.models.experts_config import ExpertsConfig
from kvferry.protocol.errors import ConfigError

FLAG = "tensor_parallel_size"
BY_EXPERT = "enable_expert_parallel"


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of one rank among several.

    whole_experts: each routed expert belongs to one rank."""

    rank: int
    ranks: int
    whole_experts: bool = False

    def of(self, config: DecoderConfig) -> DecoderConfig:
        """Return the rank's own decoder config: fewer heads, a narrower MLP and fewer words.

        Raises ConfigError naming what cannot be divided."""
        if config.shapes is not None:
            raise ConfigError(f"{FLAG}: {config.model_type} runs on one rank", param=FLAG)
        if config.hybrid is not None:
            raise ConfigError(
                f"{FLAG}: {config.model_type} has recurrent layers, which run on one rank only", param=FLAG
            )
        if self.whole_experts and config.experts is None:
            raise ConfigError(f"{BY_EXPERT}: {config.model_type} has no experts", param=BY_EXPERT)
        experts = config.experts and self._of_experts(config.experts)
        dense = experts is None or not all(experts.layers)
        return replace(
            config,
            num_kv_heads=config.num_kv_heads if config.latent else self._part(config.num_kv_heads, "K/V heads"),
            num_heads=self._part(config.num_heads, "query heads"),
            intermediate_size=self._part(config.intermediate_size, "width of the MLP") if dense else 0,
            vocab_size=self.words(config.vocab_size),
            experts=experts,
        )

    def _of_experts(self, experts: ExpertsConfig) -> ExpertsConfig:
        """Return the rank's experts.

        Where the count does not divide evenly, some ranks have one more, and rank 0 has at least one."""
        shared = self._part(experts.shared, "width of shared experts")
        if not self.whole_experts:
            return replace(experts, size=self._part(experts.size, "width of an expert"), shared=shared)
        first, last = (-(-experts.count * rank // self.ranks) for rank in (self.rank, self.rank + 1))
        return replace(experts, held=range(first, last), shared=shared)

    def words(self, vocab_size: int) -> int:
        """Return each rank's part of a vocabulary."""
        return -(-vocab_size // self.ranks)

    def _part(self, whole: int, unit: str) -> int:
        if whole % self.ranks:
            raise ConfigError(f"{FLAG} {self.ranks} does not divide the model's {unit}: {whole}", param=FLAG)
        return whole // self.ranks

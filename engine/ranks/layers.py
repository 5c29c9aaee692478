"""Sharded dense layers, embedding and norms of a rank that return whole results, by sums and gathers over ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvferry.engine.models.config import DecoderConfig
from kvferry.engine.models.parameters import Parameters
from kvferry.engine.ranks.group import Group
from kvferry.kernels.decoder_spec import Experts, Gated, Gqa, Latent, Ungated
from kvferry.kernels.linear import Linear


@dataclass(frozen=True, slots=True)
class Summed:
    """Dense layer with a shard of the inputs; outputs are summed over ranks in float32 and rounded once."""

    own: Linear
    group: Group

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.group.sum(self.own(x, torch.float32)).to(dtype or x.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Compute rows from the rank's inputs."""
        return self.own.rows(ids)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Sharded embedding or head.

    size: words of the vocabulary; words: words of this rank, beginning with its own first one."""

    own: Linear
    group: Group
    size: int
    words: int

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        parts = self.group.gather(self.own(x, torch.float32))
        return parts.transpose(0, 1).flatten(1)[:, : self.size].to(dtype or x.dtype).contiguous()

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings: each comes from the rank that has the word; the other ranks add zeros."""
        places = ids - self.group.rank * self.words
        elsewhere = (places < 0) | (places >= self.words)
        found = self.own.rows(places.masked_fill(elsewhere, 0))
        brought = found.float().masked_fill(elsewhere[:, None], 0.0)
        return self.group.sum(brought).to(found.dtype)


@dataclass(frozen=True, slots=True)
class ShardedNorm:
    """RMS norm of q and k over the heads of all ranks; each rank has equally many.

    q_norm, k_norm: weights of this rank's heads."""

    q_norm: torch.Tensor
    k_norm: torch.Tensor
    eps: float
    group: Group

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = torch.stack([each.float().square().mean(-1) for each in (q, k)])
        factors = self.group.sum(own).div_(self.group.ranks).add_(self.eps).rsqrt_()[..., None]
        q_normed, k_normed = (
            (each.float() * factor).to(each.dtype) * norm
            for each, factor, norm in zip((q, k), factors, (self.q_norm, self.k_norm), strict=True)
        )
        return q_normed, k_normed


def own_part(linear: Linear) -> Linear:
    """Return the part of a layer that the rank itself computes."""
    return linear.own if isinstance(linear, Summed | Vocabulary) else linear


def joined(parameters: Parameters, group: Group, config: DecoderConfig) -> Parameters:
    """Return the parameters of a rank's part, as layers of the whole decoder."""
    vocab_size = config.vocab_size
    words = -(-vocab_size // group.ranks)
    embedding = Vocabulary(parameters.embedding, group, vocab_size, words)
    tied = parameters.head is parameters.embedding
    layers = tuple(
        replace(
            layer,
            attention=_joined_heads(layer.attention, group, config),
            mlp=_joined(layer.mlp, group),
        )
        for layer in parameters.layers
    )
    head = embedding if tied else Vocabulary(parameters.head, group, vocab_size, words)
    return Parameters(embedding, layers, parameters.norm, head)


def _joined_heads(attention: Gqa | Latent | None, group: Group, config: DecoderConfig) -> Gqa | Latent:
    """Sum attention's output over ranks. Latent attention also waits until rank 0 has written the shared latents."""
    assert attention is not None, "shards have no recurrent layers"
    o = Summed(attention.o, group)
    if isinstance(attention, Latent):
        return replace(attention, o=o, awaited=group.written)
    q_norm, k_norm = attention.q_norm, attention.k_norm
    if not config.family.wide_qk_norm or not (isinstance(q_norm, torch.Tensor) and isinstance(k_norm, torch.Tensor)):
        return replace(attention, o=o)
    return replace(attention, o=o, normed=ShardedNorm(q_norm, k_norm, config.norm_eps, group))


def _joined(mlp: Gated | Ungated | Experts | None, group: Group) -> Gated | Ungated | Experts:
    """Sum an MLP's outputs over ranks; those of experts once they are back in token order."""
    assert mlp is not None, "shards have no recurrent layers"
    if isinstance(mlp, Experts):
        return replace(mlp, joined=group.sum)
    return replace(mlp, down=Summed(mlp.down, group))

"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): one cached vector per token yields all keys and values.

With a head's query q = [q_R; q_P] of dims that rotate and plain ones, a position's shared rotated key k_R and its
latent c, a score is q_R . k_R + q_P . (W_UK c), and what the head puts out is W_UV of the latents' weighted sum. Two
forms of the same:

absorbed    q_P . (W_UK c) = (W_UK^T q_P) . c, so all heads attend as one group to the cached vectors [k_R; c]
            themselves, which are keys and values
expanded    keys and values of each head are made for all positions, and attended to
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvferry.kernels.decoder_spec import Latent, Linear


def absorbed(q: torch.Tensor, own: Latent) -> torch.Tensor:
    """Queries [T, heads, rotated + rank] of cached vectors, of q [T, heads, rotated + plain]."""
    turned, plain = torch.split(q, [own.rotated, own.plain], -1)
    return torch.cat((turned, own.absorb(plain)), -1)


def put_out(summed: torch.Tensor, own: Latent) -> torch.Tensor:
    """[T, heads, value] of cached vectors' weighted sums [T, heads, rotated + rank]."""
    return own.up_v(summed[..., own.rotated :])


def expanded(latents: torch.Tensor, own: Latent, expand: Linear | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """K [heads, L, rotated + plain] and V of the same shape, zeros behind its dims, of cached vectors
    [L, rotated + rank]: fused attention wants equal ones. expand: as own's, of some of its heads; None: of all."""
    turned, c = torch.split(latents, [own.rotated, own.rank], -1)
    made = (expand or own.expand)(c).view(len(c), -1, own.plain + own.value)
    plain, v = torch.split(made, [own.plain, own.value], -1)
    k = torch.cat((turned[:, None].expand(-1, plain.shape[1], -1), plain), -1)
    v = F.pad(v, (0, max(0, k.shape[-1] - own.value)))
    return k.transpose(0, 1), v.transpose(0, 1)


def expands(queries: int, positions: int, own: Latent) -> bool:
    """Return whether the expanded form takes fewer products, for queries of one sequence over so many positions."""
    changed, pairs = own.rank * (own.plain + own.value), queries * positions
    in_full = positions * changed + pairs * (own.rotated + own.plain + own.value)
    return in_full < queries * changed + pairs * (own.rotated + 2 * own.rank)

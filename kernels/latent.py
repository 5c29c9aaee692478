"""Multi-head latent attention (MLA, DeepSeek-V2): absorbed queries, expanded K and V, and the choice between them.

See DeepSeek-V2 (2024), section 2.1: one cached vector per token yields all keys and values. A head's query is
q = [q_R; q_P] with rotated and plain dims. A position has a shared rotated key k_R and a latent c. Its score is
q_R . k_R + q_P . (W_UK c), and a head's output is W_UV times the weighted sum of latents. Two equivalent forms:

absorbed    q_P . (W_UK c) = (W_UK^T q_P) . c, so all heads attend as one group to the cached vectors [k_R; c]
            themselves, which serve as keys and values
expanded    keys and values of each head are computed for all positions
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvferry.kernels.decoder_spec import Latent
from kvferry.kernels.linear import Linear


def absorbed(q: torch.Tensor, own: Latent) -> torch.Tensor:
    """Return queries of cached vectors, [T, heads, rotated + rank], for q [T, heads, rotated + plain]."""
    turned, plain = torch.split(q, [own.rotated, own.plain], -1)
    return torch.cat((turned, own.absorb(plain)), -1)


def project_out(summed: torch.Tensor, own: Latent) -> torch.Tensor:
    """Return outputs [T, heads, value] for weighted sums of cached vectors, [T, heads, rotated + rank]."""
    return own.up_v(summed[..., own.rotated :])


def expanded(latents: torch.Tensor, own: Latent, expand: Linear | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V, [heads, L, rotated + plain] each, of cached vectors [L, rotated + rank].

    V is padded with zeros: fused attention wants equal shapes. expand: like own's, for some of its heads; None means
    all."""
    turned, c = torch.split(latents, [own.rotated, own.rank], -1)
    made = (expand or own.expand)(c).view(len(c), -1, own.plain + own.value)
    plain, v = torch.split(made, [own.plain, own.value], -1)
    k = torch.cat((turned[:, None].expand(-1, plain.shape[1], -1), plain), -1)
    v = F.pad(v, (0, max(0, k.shape[-1] - own.value)))
    return k.transpose(0, 1), v.transpose(0, 1)


def expands(queries: int, positions: int, own: Latent) -> bool:
    """Return whether the expanded form takes fewer products, for one sequence's queries over `positions` positions."""
    changed, pairs = own.rank * (own.plain + own.value), queries * positions
    in_full = positions * changed + pairs * (own.rotated + own.plain + own.value)
    return in_full < queries * changed + pairs * (own.rotated + 2 * own.rank)

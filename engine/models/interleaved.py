"""Reorders rows of q and k projections (MLA's, too) from interleaved rotary pairs to pairs of a head's halves."""

from __future__ import annotations

import torch

from kvferry.model_files.latent import LatentSizes

ROTATED = ("self_attn.q_proj", "self_attn.k_proj")
_CACHED = "self_attn.kv_a_proj_with_mqa"
LATENT_ROTATED = ("self_attn.q_proj", "self_attn.q_b_proj", _CACHED)
"""Projections with rotated heads, of attention by heads and of latent attention."""


def half_split(rows: torch.Tensor, head_dim: int, rotary_dim: int) -> None:
    """Reorder in place the rows of a q or k projection [heads * head_dim, ..], or the entries of its bias.

    The first rotary_dim of each head go from (0, d/2, 1, d/2 + 1, ..) to (0, 1, .., d - 1)."""
    heads = rows.view(-1, head_dim, *rows.shape[1:])[:, :rotary_dim]
    heads.copy_(torch.cat((heads[:, 0::2], heads[:, 1::2]), 1))


def rotated_first(name: str, rows: torch.Tensor, sizes: LatentSizes) -> None:
    """Reorder in place a projection of latent attention, or its bias, whose heads end with their rotated dims."""
    head_dim = len(rows) if _CACHED in name else sizes.head_dim
    heads = rows.view(-1, head_dim, *rows.shape[1:])
    rest, turned = torch.split(heads, [head_dim - sizes.rotated, sizes.rotated], 1)
    if sizes.interleaved:
        turned = torch.cat((turned[:, 0::2], turned[:, 1::2]), 1)
    heads.copy_(torch.cat((turned, rest), 1))

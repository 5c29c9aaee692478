"""Rows of projections in the order that our rotation wants: it turns the first dims of a head, pairing halves."""

from __future__ import annotations

import torch

from model_files.latent import LatentSizes

ROTATED = ("self_attn.q_proj", "self_attn.k_proj")
_QUERIES, _CACHED = ("self_attn.q_proj", "self_attn.q_b_proj"), "self_attn.kv_a_proj_with_mqa"


def half_split(rows: torch.Tensor, head_dim: int, rotary_dim: int) -> None:
    """Reorder in place the rows of a q or k projection [heads * head_dim, ..] or the entries of its bias: of each head
    the first rotary_dim from (0, d/2, 1, d/2 + 1, ..) to (0, 1, .., d - 1)."""
    heads = rows.view(-1, head_dim, *rows.shape[1:])[:, :rotary_dim]
    heads.copy_(torch.cat((heads[:, 0::2], heads[:, 1::2]), 1))


def rotated_first(name: str, rows: torch.Tensor, sizes: LatentSizes) -> None:
    """Reorder in place those of a projection of latent attention, or the entries of its bias, whose heads end with what
    rotates."""
    if _CACHED in name:
        _to_front(rows, len(rows), sizes)
    elif any(each in name for each in _QUERIES):
        _to_front(rows, sizes.head_dim, sizes)


def _to_front(rows: torch.Tensor, head_dim: int, sizes: LatentSizes) -> None:
    heads = rows.view(-1, head_dim, *rows.shape[1:])
    rest, turned = torch.split(heads, [head_dim - sizes.rotated, sizes.rotated], 1)
    if sizes.interleaved:
        turned = torch.cat((turned[:, 0::2], turned[:, 1::2]), 1)
    heads.copy_(torch.cat((turned, rest), 1))

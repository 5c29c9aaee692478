"""Families whose rotation pairs neighbours in a head: their q and k are read as ours, which rotate halves."""

from __future__ import annotations

import torch

ROTATED = ("self_attn.q_proj", "self_attn.k_proj")


def half_split(rows: torch.Tensor, head_dim: int, rotary_dim: int) -> None:
    """Reorder in place the rows of a q or k projection [heads * head_dim, ..] or the entries of its bias: of each head
    the first rotary_dim from (0, d/2, 1, d/2 + 1, ..) to (0, 1, .., d - 1)."""
    heads = rows.view(-1, head_dim, *rows.shape[1:])[:, :rotary_dim]
    heads.copy_(torch.cat((heads[:, 0::2], heads[:, 1::2]), 1))

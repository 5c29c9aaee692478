"""Attention within media towers on the CPU's kernels: each token of an image or a clip attends to all of its tokens.

Registered as one of transformers' attention functions. What the kernels do not take runs in PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from kvferry.engine.models.hf import transformers_module
from kvferry.kernels.cpu import CpuOps
from kvferry.kernels.cpu.full_attention import fits, full_attention

_NAME, _OPS = "kvferry_tower", "kvferry_tower_ops"
"""Name of the function, and of the attribute of a tower's modules with the operations that it calls."""


def set_attention(module: Any, ops: CpuOps) -> None:
    """Let a tower's attention modules call these operations."""
    transformers = transformers_module()
    functions, masks = transformers.AttentionInterface, transformers.AttentionMaskInterface
    in_pytorch = functions()["sdpa"]

    def attend(
        part: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> Any:
        if attention_mask is not None or not _takes(part, query, value, options):
            return in_pytorch(part, query, key, value, attention_mask, **options)
        scale = options.get("scaling")
        return full_attention(getattr(part, _OPS), query, key, value, scale or query.shape[-1] ** -0.5), None

    functions.register(_NAME, attend)
    masks.register(_NAME, masks()["sdpa"])
    module.set_attn_implementation(_NAME)
    for part in module.modules():
        setattr(part, _OPS, ops)


def _takes(part: Any, query: torch.Tensor, value: torch.Tensor, options: dict[str, Any]) -> bool:
    """Return whether the kernel computes this attention, which has no mask."""
    causal = options.get("is_causal")
    return (
        fits(query, value)
        and not (getattr(part, "is_causal", True) if causal is None else causal)
        and not any(options.get(name) is not None for name in ("softcap", "s_aux", "position_bias"))
    )

"""Rotary embedding tables (cos and sin) of a RopeConfig: plain, linear, llama3, YaRN, longrope or proportional.

Plain: Su et al. 2021. linear: Chen et al. 2023. llama3: the frequency-wise scaling of Llama 3.1. yarn: Peng et al.
2023. longrope: Ding et al. 2024; if sequences may be longer than the original length, all use the factors of long
contexts, because cached keys cannot follow a sequence that becomes long. dynamic: its frequencies depend on the current
length, too, so the model is served up to its original length, where dynamic equals default. proportional (Gemma 4):
pairs of dims span the head, and only the first of them rotate."""

from __future__ import annotations

import math

import torch

from kvferry.engine.models.rope_config import RopeConfig, mscale
from kvferry.protocol.errors import ConfigError

ROWS_AT_ONCE = 1 << 15
"""Rows of the tables that are computed together, in positions."""


class RopeTables:
    """Tables `cos` and `sin`, float32 [length, rope.dim / 2], whose rows are computed once a sequence reaches them.

    Tables of contexts of millions of tokens take GiB, and rows of a CPU take memory once they are written. On other
    devices all rows are computed at once. divisors [rope.dim / 2]: per-frequency factors that a GGUF has in place of
    llama3's settings."""

    def __init__(
        self, rope: RopeConfig, length: int, device: torch.device, divisors: torch.Tensor | None = None
    ) -> None:
        self._frequencies, self._scale = _frequencies(rope, length)
        if divisors is not None:
            self._frequencies = self._frequencies / divisors.float().cpu()
        shape = length, len(self._frequencies)
        self.cos, self.sin = torch.empty(shape, device=device), torch.empty(shape, device=device)
        self._computed = 0
        self.grow_to(1 if device.type == "cpu" else length)

    def grow_to(self, length: int) -> None:
        """Compute the rows of sequences of this length that are missing."""
        while self._computed < min(length, len(self.cos)):
            begin, end = self._computed, min(self._computed + ROWS_AT_ONCE, len(self.cos))
            angles = torch.outer(torch.arange(begin, end, dtype=torch.float32), self._frequencies)
            self.cos[begin:end] = angles.cos().mul_(self._scale)
            self.sin[begin:end] = angles.sin_().mul_(self._scale)
            self._computed = end


def _frequencies(rope: RopeConfig, length: int) -> tuple[torch.Tensor, float]:
    """Return inverse frequencies, float32 [dim / 2], and the factor of cos and sin."""
    plain = 1.0 / rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    if rope.kind == "proportional":
        plain[int(rope.turning * rope.dim // 2) :] = 0.0
        return plain / rope.factor, 1.0
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(plain, rope), _yarn_attention(rope)
    if rope.kind == "longrope":
        return _longrope(plain, rope, length), _longrope_attention(rope, length)
    return plain, 1.0


def _llama3(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Scale frequencies like Llama 3.1.

    Wavelengths beyond original / low_freq_factor are stretched by factor; those below original / high_freq_factor are
    kept; in between, the two blend linearly in frequency."""
    turns = rope.original_max_len * plain / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - keep) * plain / rope.factor + keep * plain


def _yarn(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Scale frequencies like YaRN (the paper's equations 17-23, in dimension index).

    Dimensions that turn more than beta_fast times over the original context are kept; those that turn less than
    beta_slow times are stretched; in between is a ramp."""

    def dimension(turns: float) -> float:
        return rope.dim * math.log(rope.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    index = torch.arange(rope.dim // 2, dtype=torch.float32)
    stretch = ((index - low) / ((high - low) or 0.001)).clamp(0, 1)
    return plain / rope.factor * stretch + plain * (1 - stretch)


def _yarn_attention(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.factor, rope.mscale) / mscale(rope.factor, rope.mscale_all_dim)
    return mscale(rope.factor)


def stretched(rope: RopeConfig, length: int) -> bool:
    """Return whether sequences of up to this length have other frequencies than those of the original length."""
    return rope.kind == "longrope" and length > rope.original_max_len


def _longrope(plain: torch.Tensor, rope: RopeConfig, length: int) -> torch.Tensor:
    factors = rope.long_factor if stretched(rope, length) else rope.short_factor
    if len(factors) != len(plain):
        raise ConfigError(f"rope: {len(factors)} factors for {len(plain)} frequencies", param="model")
    return plain / torch.tensor(factors)


def _longrope_attention(rope: RopeConfig, length: int) -> float:
    """Return the paper's factor of attention, whatever the length served: the weights were trained with it.

    Phi-MoE's config has one for each of both lengths."""
    if (own := rope.long_mscale if stretched(rope, length) else rope.short_mscale) is not None:
        return own
    if rope.attention_factor is not None:
        return rope.attention_factor
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_len)) if rope.factor > 1 else 1.0

"""Constant factors (of embeddings, attention, residuals, logits) and soft caps of a decoder, from a config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvferry.engine.models.family import Family
from kvferry.engine.models.rope_config import RopeConfig, mscale
from kvferry.model_files.config_fields import number_or
from kvferry.model_files.latent import LatentSizes
from kvferry.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Factors:
    """Constant factors of a family: of embeddings, residual additions and logits.

    attention: in place of 1 / sqrt(head_dim), unless 0."""

    embedding: float = 1.0
    attention: float = 0.0
    residual: float = 1.0
    logits: float = 1.0


@dataclass(frozen=True, slots=True)
class Caps:
    """Soft caps: attention scores and logits x become cap * tanh(x / cap); 0: no cap.

    qkv: bound of the magnitudes of q, k and v before the rotation; 0: none."""

    attention: float = 0.0
    logits: float = 0.0
    qkv: float = 0.0


UNSCALED, UNCAPPED = Factors(), Caps()


def parse_factors(
    config: dict[str, Any], family: Family, hidden_size: int, latent: LatentSizes | None, rope: RopeConfig
) -> Factors:
    """Return the factors of a config. latent: sizes of attention over a latent, or None."""
    if latent is not None:
        return Factors(attention=_latent_scale(latent, rope))
    if not family.factors:
        scalar = 1.0 if family.shaped else config.get("query_pre_attn_scalar") or 0
        return Factors(
            embedding=hidden_size**0.5 if family.embedding_root else 1.0,
            attention=scalar and scalar**-0.5,
            logits=float(config.get("logit_scale", family.logit_scale)),
        )
    return Factors(
        embedding=float(config.get("embedding_multiplier", 1.0)),
        attention=float(config.get("attention_multiplier", 1.0)),
        residual=float(config.get("residual_multiplier", 1.0)),
        logits=1.0 / float(config.get("logits_scaling", 1.0)),
    )


def parse_residuals(config: dict[str, Any]) -> tuple[float, float, float] | None:
    """Return MiniMax-01's factors of the normed residuals of attention, mixers and MLPs; None for other families.

    Raises ConfigError."""
    if config["model_type"] != "minimax":
        return None
    kinds = ("full_attn", "linear_attn", "mlp")
    for name in (f"{kind}_beta_factor" for kind in kinds):
        if config.get(name, 1) != 1:
            raise ConfigError(f"config.json: {name} must be 1, got {config[name]!r:.40}", param="model")
    attention, mixer, mlp = (number_or(config, f"{kind}_alpha_factor", 1.0) for kind in kinds)
    return attention, mixer, mlp


def _latent_scale(sizes: LatentSizes, rope: RopeConfig) -> float:
    """Return the scale of scores: with scaled rope, YaRN's attention factor applies to queries and keys as a whole.

    That includes the dims that are not rotated."""
    factor = mscale(rope.factor, rope.mscale_all_dim) if rope.kind != "default" and rope.mscale_all_dim else 1.0
    return float(sizes.head_dim**-0.5 * factor**2)


def parse_caps(config: dict[str, Any], family: Family) -> Caps:
    """Return the caps. Gemma 2's defaults apply if the config has none; null means no cap."""
    if family.shaped:
        return Caps(logits=float(config.get("final_logit_softcapping", family.logit_cap) or 0.0))
    if not family.capped:
        return Caps(qkv=number_or(config, "clip_qkv", 0.0) if family.clipped else 0.0)
    attention, logits = config.get("attn_logit_softcapping", 50.0), config.get("final_logit_softcapping", 30.0)
    return Caps(float(attention or 0.0), float(logits or 0.0))

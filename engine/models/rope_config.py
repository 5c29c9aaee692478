"""Rotary embedding settings, parsed from a config.json in old and new spellings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvferry.engine.models.families import Family
from kvferry.protocol.errors import ConfigError

SLIDING = "sliding_attention"
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding settings.

    kind: one of ROPE_KINDS. original_max_len: the context before stretching. The other fields belong to the kinds that
    name them, with Hugging Face's meanings and defaults."""

    theta: float
    dim: int
    original_max_len: int
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


def mscale(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's attention factor for a stretching by `factor` (Peng et al. 2023, equation 22)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_dicts(config: dict[str, Any], family: Family) -> list[dict[str, Any]]:
    """Return the rotary settings of all layers, or of those without and with a window.

    transformers 5 moved rope_theta and rope_scaling into rope_parameters; older checkpoints keep the old names."""
    given, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if not family.two_ropes:
        return [{**scaling, **given}]
    if "full_attention" in given:
        return [given["full_attention"], given[SLIDING]]
    theta = config.get("rope_local_base_freq") or (10000.0 if family.gelu else config.get("rope_theta"))
    return [{**scaling, **given}, {"rope_theta": theta}]


def rope_kind(rope: dict[str, Any]) -> str:
    """Return the kind of rope. Phi-3's first checkpoints call longrope su; mrope of text is plain rope."""
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    return {"su": "longrope", "mrope": "default"}.get(kind, kind)


def parse_rope(config: dict[str, Any], rope: dict[str, Any], family: Family, head_dim: int) -> RopeConfig:
    """Parse the rotary settings of a config. Raises ConfigError."""
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or family.partial
    if not 0 < partial <= 1:
        raise ConfigError(
            f"rope: partial_rotary_factor must be above 0 and at most 1, got {partial!r:.40}", param="model"
        )
    longest = config["max_position_embeddings"]
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or longest
    optional = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale")
    given = {name: rope[name] for name in (*optional, "mscale_all_dim", "truncate") if rope.get(name) is not None}
    given |= {name: tuple(rope[name]) for name in ("short_factor", "long_factor") if rope.get(name)}
    return RopeConfig(
        theta=float(rope.get("rope_theta") or config.get("rope_theta") or family.theta),
        dim=int(head_dim * partial),
        original_max_len=original,
        kind=rope_kind(rope),
        factor=float(rope.get("factor") or longest / original),
        **given,
    )

"""RopeConfig: rotary embedding settings, parsed from a config.json in the old and new spellings of transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvferry.engine.models.family import Family
from kvferry.model_files.config_fields import number_or
from kvferry.protocol.errors import ConfigError

SLIDING = "sliding_attention"
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
SHAPED_KINDS = (*ROPE_KINDS, "proportional")
"""Kinds of rope, and those of families whose layers have shapes of their own: there a partial rotation leaves gaps."""

PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0}
"""Gemma 4's rope of layers without a window, unless the config says."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding settings.

    kind: one of SHAPED_KINDS. dim: of the heads, so far as they are paired for rotation. turning: share of these pairs
    that rotate, the first ones. original_max_len: the context before stretching. sections: how many frequencies time,
    height and width turn (M-RoPE); empty: one position turns all. interleaved: the three take turns from the first
    frequency on, and time has the rest; else their frequencies lie one after the other. The other fields belong to the
    kinds that name them, with Hugging Face's meanings and defaults."""

    theta: float
    dim: int
    original_max_len: int
    kind: str = "default"
    turning: float = 1.0
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
    short_mscale: float | None = None
    long_mscale: float | None = None
    sections: tuple[int, ...] = ()
    interleaved: bool = False


def mscale(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's attention factor for a stretching by `factor` (Peng et al. 2023, equation 22)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_dicts(config: dict[str, Any], family: Family) -> list[dict[str, Any]]:
    """Return the rotary settings of all layers, or of those without and with a window.

    transformers 5 moved rope_theta and rope_scaling into rope_parameters; older checkpoints keep the old names."""
    given, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if not family.two_ropes:
        return [{**scaling, **given}]
    if family.shaped:
        full = PROPORTIONAL if config["model_type"] == "gemma4_text" else {}
        local = {"rope_theta": config.get("rope_local_base_freq") or 10000.0}
        return [given.get("full_attention") or scaling or full, local | (given.get(SLIDING) or {})]
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
    others = ("mscale_all_dim", "truncate", "short_mscale", "long_mscale")
    given = {name: rope[name] for name in (*optional, *others) if rope.get(name) is not None}
    given |= {name: tuple(rope[name]) for name in ("short_factor", "long_factor") if rope.get(name)}
    kind = rope_kind(rope)
    gaps = kind == "proportional"
    dim = head_dim if gaps else int(head_dim * partial)
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or family.theta)
    if family.ntk_alpha and kind == "dynamic" and (alpha := number_or(rope, "alpha", 0.0)) and dim > 2:
        # The base is stretched once and for all (NTK-aware scaling): no frequency depends on the length of a sequence.
        theta, kind = theta * alpha ** (dim / (dim - 2)), "default"
    return RopeConfig(
        theta=theta,
        dim=dim,
        turning=partial if gaps else 1.0,
        original_max_len=original,
        kind=kind,
        sections=_sections(rope, dim),
        interleaved=bool(rope.get("mrope_interleaved")),
        factor=float(rope.get("factor") or longest / original),
        **given,
    )


def _sections(rope: dict[str, Any], dim: int) -> tuple[int, ...]:
    """Return the sections of M-RoPE, which text alone does not need. Raises ConfigError."""
    found = rope.get("mrope_section") or ()
    whole = isinstance(found, list | tuple) and all(isinstance(each, int) and each >= 0 for each in found)
    if not whole or (found and (len(found) != 3 or sum(found) != dim // 2)):
        raise ConfigError(
            f"rope: mrope_section must be three numbers of sum {dim // 2}, got {found!r:.40}", param="model"
        )
    return tuple(found)

"""Mixture-of-experts settings of a config.json: which layers have experts, how many, and the routing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvferry.engine.models.family import ExpertNames, Family
from kvferry.kernels.expert_routing import Routing
from kvferry.kernels.gate_spec import Gate
from kvferry.model_files.config_fields import whole, whole_or
from kvferry.model_files.expert_fields import COUNTS, holds_experts, shared_width
from kvferry.model_files.recurrent_fields import SIZES
from kvferry.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Experts of a model: `count` of width `size`; layers[i]: layer i has them in place of its MLP, or beside it.

    held: those on this rank, or a part of each. shared: width of the MLP that all tokens pass through, too, 0 for none.
    gate: their own activation, or None. latent: numbers of the vectors that experts take and give; 0: hidden states."""

    count: int
    size: int
    layers: tuple[bool, ...]
    routing: Routing
    held: range
    shared: int = 0
    gate: Gate | None = None
    latent: int = 0


def unsupported_routing(config: dict[str, Any], names: ExpertNames) -> str | None:
    """Return the routing feature that `Routing` lacks."""
    methods = ("noaux_tc",) if names.correction else ("greedy", "group_limited_greedy")
    scores = "sigmoid" if names.sigmoid else "softmax"
    if (config.get("topk_method") or methods[0]) not in methods:
        return f"topk_method {config['topk_method']!r:.80}"
    if config.get("scoring_func", scores) != scores:
        return f"scoring_func {config['scoring_func']!r:.80}"
    return None


def parse_experts(config: dict[str, Any], family: Family, layers: int) -> ExpertsConfig | None:
    """Return the experts of a config with common names (`model_files.expert_fields`); None without any.

    Raises ConfigError, or KeyError if a field is missing."""
    names = family.experts
    if family.shaped and config.get("enable_moe_block"):
        return _beside(config, layers)
    if names is None:
        return None
    counted = next((name for name in COUNTS if name in config), COUNTS[1])
    if config.get(counted) == 0 and config.get("model_type") in SIZES:
        return None
    count = whole(config, counted)
    size = whole(config, "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size")
    return ExpertsConfig(
        count=count,
        size=size,
        layers=tuple(holds_experts(config, index) for index in range(layers)),
        routing=_routing(config, names, count),
        held=range(count),
        shared=shared_width(config, size),
        gate=_clamped(config) if names.clamped else None,
        latent=whole_or(config, "moe_latent_size", 0),
    )


def _beside(config: dict[str, Any], layers: int) -> ExpertsConfig:
    """Return Gemma 4's experts, which each layer has beside its MLP."""
    count, chosen = whole(config, "num_experts"), whole(config, "top_k_experts")
    if chosen > count:
        raise ConfigError(f"config.json: top_k_experts is {chosen}, of {count} experts", param="model")
    routing, size = Routing(chosen, renormalised=True), whole(config, "moe_intermediate_size")
    return ExpertsConfig(count, size, (True,) * layers, routing, range(count))


def _routing(config: dict[str, Any], names: ExpertNames, count: int) -> Routing:
    chosen, judged = whole(config, "num_experts_per_tok"), 2 if names.grouped else 1
    if chosen > count:
        raise ConfigError(f"config.json: num_experts_per_tok is {chosen}, of {count} experts", param="model")
    groups = kept = 1
    if names.grouped or config.get("topk_method") == "group_limited_greedy":
        groups, kept = whole(config, "n_group"), whole(config, "topk_group")
    if count % groups or kept > groups or chosen > count // groups * kept or count < groups * judged:
        raise ConfigError(
            f"config.json: {chosen} of {count} experts cannot be chosen in {kept} of {groups} groups", param="model"
        )
    return Routing(
        chosen=chosen,
        renormalised=bool(config.get("norm_topk_prob", names.renormalised)),
        sigmoid=names.sigmoid,
        groups=groups,
        kept=kept,
        judged=judged,
        factor=float(config.get("routed_scaling_factor") or 1.0),
        min_sum=float(config.get("moe_norm_min") or 1e-20),
        tolerance=2 * float(config.get("router_jitter_noise", 0.01)) if names.mixer else 0.0,
        on_inputs=names.on_inputs,
    )


def _clamped(config: dict[str, Any]) -> Gate:
    """Return gpt-oss's activation."""
    limit = float(config.get("swiglu_limit", 7.0))
    return Gate(slope=float(config.get("swiglu_alpha", 1.702)), limit=limit, offset=1.0)

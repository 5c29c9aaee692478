"""Mixture-of-experts settings of a config.json: which layers have experts, how many, and the routing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvferry.engine.models.families import ExpertNames, Family
from kvferry.kernels.expert_routing import Routing
from kvferry.kernels.gated_activation import Gate
from kvferry.model_files.config_fields import whole, whole_or
from kvferry.protocol.errors import ConfigError

_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names of the number of experts; transformers writes the first for the second."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Experts of a model: `count` of width `size`; layers[i]: layer i has them in place of its MLP.

    held: those on this rank, or a part of each. shared: width of the MLP that all tokens pass through, too, 0 for none.
    gate: their own activation, or None."""

    count: int
    size: int
    layers: tuple[bool, ...]
    routing: Routing
    held: range
    shared: int = 0
    gate: Gate | None = None


def unsupported_routing(config: dict[str, Any], names: ExpertNames) -> str | None:
    """Return the routing feature that `Routing` lacks."""
    methods = ("noaux_tc",) if names.sigmoid else ("greedy", "group_limited_greedy")
    scores = "sigmoid" if names.sigmoid else "softmax"
    if (config.get("topk_method") or methods[0]) not in methods:
        return f"topk_method {config['topk_method']!r:.80}"
    if config.get("scoring_func", scores) != scores:
        return f"scoring_func {config['scoring_func']!r:.80}"
    return None


def parse_experts(config: dict[str, Any], family: Family, layers: int) -> ExpertsConfig | None:
    """Return the experts of a config; None without any. Raises ConfigError, or KeyError if a field is missing."""
    names = family.experts
    if names is None:
        return None
    count = whole(config, next((name for name in _COUNTS if name in config), _COUNTS[1]))
    size = whole(config, "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size")
    return ExpertsConfig(
        count=count,
        size=size,
        layers=tuple(_holds_experts(config, index) for index in range(layers)),
        routing=_routing(config, names, count),
        held=range(count),
        shared=size * whole_or(config, "n_shared_experts", 0),
        gate=_clamped(config) if names.clamped else None,
    )


def _holds_experts(config: dict[str, Any], index: int) -> bool:
    dense, every = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    first, each = config.get("first_k_dense_replace") or 0, config.get("moe_layer_freq") or 1
    return index not in dense and (index + 1) % every == 0 and index >= first and index % each == 0


def _routing(config: dict[str, Any], names: ExpertNames, count: int) -> Routing:
    chosen, judged = whole(config, "num_experts_per_tok"), 2 if names.sigmoid else 1
    if chosen > count:
        raise ConfigError(f"config.json: num_experts_per_tok is {chosen}, of {count} experts", param="model")
    groups = kept = 1
    if names.sigmoid or config.get("topk_method") == "group_limited_greedy":
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
        factor=float(config.get("routed_scaling_factor", 1.0)),
    )


def _clamped(config: dict[str, Any]) -> Gate:
    """Return gpt-oss's activation."""
    limit = float(config.get("swiglu_limit", 7.0))
    return Gate(slope=float(config.get("swiglu_alpha", 1.702)), limit=limit, offset=1.0)

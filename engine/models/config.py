"""DecoderConfig: configuration of our own decoder for all its families, parsed from a config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvferry.engine.models.altup_config import AltUpConfig, parse_altup
from kvferry.engine.models.dense_families import LLAMA
from kvferry.engine.models.experts_config import ExpertsConfig, parse_experts
from kvferry.engine.models.factors import UNCAPPED, UNSCALED, Caps, Factors, parse_caps, parse_factors, parse_residuals
from kvferry.engine.models.families import FAMILIES
from kvferry.engine.models.family import Family
from kvferry.engine.models.multipliers import Multipliers, parse_multipliers
from kvferry.engine.models.rope_config import RopeConfig, parse_rope, rope_dicts
from kvferry.engine.models.unsupported_configs import UNGATED, unsupported
from kvferry.engine.models.windows import rotations_and_windows
from kvferry.kernels import gate_spec
from kvferry.kernels.activation import Kind
from kvferry.model_files.config_fields import check_layers, number_or, whole, whole_or
from kvferry.model_files.expert_fields import common_names
from kvferry.model_files.hybrid import HybridLayers, hybrid_layers
from kvferry.model_files.latent import LatentSizes, latent_sizes
from kvferry.model_files.layer_shapes import LayerShapes, layer_shapes
from kvferry.model_files.recurrent import Shapes
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.layout import CachedLayer


@dataclass(frozen=True, slots=True)
class Temperature:
    """Factor of a query at a position: 1 + scale * ln(1 + floor((position + ahead) / span)). span: in positions."""

    scale: float
    span: int
    ahead: int = 0

    def table(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the factors of the first positions, float32 [length]."""
        spans = (torch.arange(length) + self.ahead) // self.span
        return (1 + self.scale * torch.log1p(spans.float())).to(device)


def parse_temperature(config: dict[str, Any]) -> Temperature | None:
    """Return the temperature of Llama 4's layers that do not rotate; None without. Raises ConfigError."""
    if not config.get("attn_temperature_tuning", True):
        return None
    scale = config.get("attn_scale", 0.1)
    if not isinstance(scale, int | float):
        raise ConfigError(f"config.json: attn_scale must be a number, got {scale!r:.80}", param="model")
    return Temperature(float(scale), whole_or(config, "floor_scale", 8192), ahead=1)


def rope_temperature(rope: dict[str, Any], original: int) -> Temperature | None:
    """Return Ministral 3's temperature, from its rotary settings; None without. original: context before stretching.

    Raises ConfigError."""
    scale = number_or(rope, "llama_4_scaling_beta", 0.0)
    return Temperature(scale, original) if scale else None


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Configuration of a decoder. rotated[i]: layer i applies rope.

    windows[i]: its window, see `protocol.attention_window`. local_rope: of layers with a window, if different. experts:
    of layers that have them, or None. latent: sizes of attention over a latent, or None; then head_dim and num_kv_heads
    describe queries only. shapes: of layers that differ, or None; then head_dim, num_kv_heads and intermediate_size are
    those of the first. altup: of Gemma 3n, or None. temperature: of queries in all layers, or in those that do not
    rotate, or None. hybrid: which layers have recurrent mixers, or None. residuals: factors of residuals that are
    outputs of norms, of attention, mixers and MLPs, or None. activation: of MLPs without a gate, or None. parallel:
    attention and MLP are added together."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    rotated: tuple[bool, ...]
    windows: tuple[int, ...]
    family: Family = LLAMA
    factors: Factors = UNSCALED
    local_rope: RopeConfig | None = None
    experts: ExpertsConfig | None = None
    caps: Caps = UNCAPPED
    latent: LatentSizes | None = None
    shapes: LayerShapes | None = None
    altup: AltUpConfig | None = None
    hybrid: HybridLayers | None = None
    multipliers: Multipliers | None = None
    temperature: Temperature | None = None
    residuals: tuple[float, float, float] | None = None
    activation: Kind | None = None
    parallel: bool = False
    head_bias: bool = False

    @property
    def plain(self) -> bool:
        """Return whether its layers are those of Llama, but for recurrent mixers: see `Family.plain`."""
        others = (self.local_rope, self.experts, self.shapes, self.residuals, self.parallel, self.caps.qkv)
        return self.family.plain and not any(others)

    @property
    def cached(self) -> tuple[CachedLayer, ...]:
        """Return the cache shape of each layer that writes K/V."""
        if self.shapes is not None:
            return self.shapes.cached
        latent = self.latent
        each = CachedLayer(self.num_kv_heads, self.head_dim) if latent is None else CachedLayer(1, latent.cached, 1)
        return (each,) * self.cached_layers

    @property
    def cached_layers(self) -> int:
        """Return the number of layers with K/V."""
        return self.num_layers if self.hybrid is None else self.hybrid.attending

    def kept(self, index: int) -> tuple[float, float] | None:
        """Return the factors of a layer's residuals, if these are outputs of norms (see `LayerForm`); else None."""
        if self.residuals is None or self.hybrid is None:
            return None
        attention, mixer, mlp = self.residuals
        return (mixer if self.hybrid.recurs(index) else attention), mlp

    @property
    def states(self) -> Shapes:
        """Return the shapes of a sequence's recurrent state over all layers."""
        return () if self.hybrid is None else self.hybrid.states

    @property
    def gate(self) -> gate_spec.Gate:
        """Return the activation of its MLPs."""
        if self.experts is not None and self.experts.gate is not None:
            return self.experts.gate
        return gate_spec.GELU if self.family.gelu else gate_spec.SILU

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all K heads, which is that of all V heads."""
        return self.num_kv_heads * self.head_dim


def parse_config(config: dict[str, Any]) -> DecoderConfig:
    """Return the DecoderConfig of a config.json. Raises ConfigError naming an unsupported or missing field."""
    reason = unsupported(config)
    if reason is not None:
        raise ConfigError(f"kvferry's own decoder does not support {reason}", param="model")
    try:
        return _parse(common_names(config))
    except KeyError as error:
        raise ConfigError(f"config.json lacks {error.args[0]}", param="model") from error


def _parse(config: dict[str, Any]) -> DecoderConfig:
    family = FAMILIES[config["model_type"]]
    heads, layers, hidden_size = (
        whole(config, name) for name in ("num_attention_heads", "num_hidden_layers", "hidden_size")
    )
    check_layers(layers)
    latent = latent_sizes(config) if family.latent else None
    shapes = layer_shapes(config) if family.shaped else None
    head_dim = latent.head_dim if latent else whole_or(config, "head_dim", family.head_dim or hidden_size // heads)
    of_qkv, of_output, of_mlp = family.biases
    bias = bool(config.get(of_qkv, family.attention_bias))
    rotated, windows = rotations_and_windows(config, layers, family)
    turned = [latent.rotated if latent else head_dim] * 2
    if shapes is not None:
        windows = tuple(whole(config, "sliding_window") if slides else 0 for slides in shapes.sliding)
        turned = [shapes.rotated(slides, head_dim) for slides in (False, True)]
    ropes = zip(rope_dicts(config, family), turned, strict=False)
    rope, *local = [parse_rope(config, each, family, dims) for each, dims in ropes]
    return DecoderConfig(
        model_type=config["model_type"],
        vocab_size=whole(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=whole(config, "intermediate_size") if shapes is None else shapes.widths[0],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=whole_or(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        norm_eps=number_or(config, *family.eps),
        tie_embeddings=bool(config.get("tie_word_embeddings", family.tie_embeddings)),
        qkv_bias=bool(config.get("qkv_bias", family.qkv_bias)) or bias,
        o_bias=family.o_bias and bool(config.get(of_output, bias if of_output == of_qkv else False)),
        mlp_bias=bool(config.get(of_mlp, family.mlp_bias)),
        qk_norm=bool(config.get(family.qk_norm_option, family.qk_norm)),
        head_bias=bool(config.get(family.head_bias_option, family.head_bias)),
        rope=rope,
        local_rope=local[0] if local else None,
        rotated=rotated,
        windows=windows,
        family=family,
        factors=parse_factors(config, family, hidden_size, latent, rope),
        experts=parse_experts(config, family, layers),
        caps=parse_caps(config, family),
        latent=latent,
        shapes=shapes,
        altup=parse_altup(config, layers) if family.streams else None,
        hybrid=hybrid_layers(config),
        multipliers=parse_multipliers(config),
        temperature=_temperature(config, family, rope),
        residuals=parse_residuals(config),
        activation=UNGATED[config.get("hidden_act") or family.activation] if family.activation else None,
        parallel=family.parallel or (family.parallel_option and bool(config.get("use_parallel_residual"))),
    )


def _temperature(config: dict[str, Any], family: Family, rope: RopeConfig) -> Temperature | None:
    if family.chunked:
        return parse_temperature(config)
    return rope_temperature(rope_dicts(config, family)[0], rope.original_max_len) if family.tempered else None

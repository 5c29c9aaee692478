"""Decoder configuration of the Llama family, parsed from a config.json in old and new spellings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvferry.engine.models.experts_config import ExpertsConfig, parse_experts, unsupported_routing
from kvferry.engine.models.families import FAMILIES, LLAMA, Family
from kvferry.engine.models.rope_config import ROPE_KINDS, RopeConfig, mscale, parse_rope, rope_dicts, rope_kind
from kvferry.engine.models.windows import rotations_and_windows
from kvferry.model_files.config_fields import check_layers, whole, whole_or
from kvferry.model_files.latent import LatentSizes, latent_sizes
from kvferry.model_files.quantisation import quantisation
from kvferry.protocol.errors import ConfigError

SILU, GELU = ("silu", "swish"), ("gelu", "gelu_pytorch_tanh")
"""Names of activations. Gemma's first checkpoints call GELU by tanh gelu."""


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
    """Soft caps: attention scores and logits x become cap * tanh(x / cap); 0: no cap."""

    attention: float = 0.0
    logits: float = 0.0


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Configuration of a decoder. rotated[i]: layer i applies rope.

    windows[i]: its sliding window, 0 for full attention. local_rope: of layers with a window, if different. experts: of
    layers that have them, or None. latent: sizes of attention over a latent, or None; then head_dim and num_kv_heads
    describe queries only."""

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
    factors: Factors = Factors()
    local_rope: RopeConfig | None = None
    experts: ExpertsConfig | None = None
    caps: Caps = Caps()
    latent: LatentSizes | None = None

    @property
    def plain(self) -> bool:
        """Return whether its layers are those of Llama: one RMS norm before each part, SiLU, one rotation, no caps."""
        family = self.family
        own = (family.norm_behind, family.gelu, family.wide_qk_norm, family.capped, family.centred, family.sinks)
        return not any((*own, self.local_rope, self.experts, self.latent))

    @property
    def cached(self) -> tuple[int, int, int]:
        """Return the cache shape of a token in each layer: K/V heads, their dim, planes."""
        return (self.num_kv_heads, self.head_dim, 2) if self.latent is None else (1, self.latent.cached, 1)

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all K heads, which is that of all V heads."""
        return self.num_kv_heads * self.head_dim


def unsupported(config: dict[str, Any]) -> str | None:
    """Return why kvferry's decoder cannot run this config.json (transformers may still); None: it can."""
    if config.get("model_type") not in FAMILIES:
        return f"architecture {config.get('model_type')!r:.80} is not one of {', '.join(FAMILIES)}"
    family = FAMILIES[config["model_type"]]
    if (stored := config.get("quantization_config")) and (quantisation(config) is None) != family.stacked:
        return f"quantisation {stored.get('quant_method', 'unnamed')!r:.80} of a checkpoint of {config['model_type']}"
    act = config.get("hidden_activation") or config.get("hidden_act", "")
    if act not in ("", *(GELU if family.gelu else SILU)):
        return f"activation {act!r:.80}"
    names = ["use_bidirectional_attention", "clip_qkv"]
    if not family.capped:
        names += ["attn_logit_softcapping", "final_logit_softcapping"]
    if family.latent:
        names.append("mlp_bias")
    for name in names:
        if config.get(name):
            return name
    if family.experts is not None and (routing := unsupported_routing(config, family.experts)) is not None:
        return routing
    for rope in rope_dicts(config, family):
        if any(isinstance(value, dict) for value in rope.values()):
            return "rope parameters that differ between layers"
        if rope_kind(rope) not in ROPE_KINDS:
            return f"rope scaling {rope_kind(rope)!r:.80}"
    return None


def parse_config(config: dict[str, Any]) -> DecoderConfig:
    """Return the DecoderConfig of a config.json. Raises ConfigError naming what is unsupported or missing."""
    reason = unsupported(config)
    if reason is not None:
        raise ConfigError(f"kvferry's own decoder does not support {reason}", param="model")
    try:
        return _parse(config)
    except KeyError as error:
        raise ConfigError(f"config.json lacks {error.args[0]}", param="model") from error


def _parse(config: dict[str, Any]) -> DecoderConfig:
    family = FAMILIES[config["model_type"]]
    heads, layers, hidden_size = (
        whole(config, name) for name in ("num_attention_heads", "num_hidden_layers", "hidden_size")
    )
    check_layers(layers)
    latent = latent_sizes(config) if family.latent else None
    head_dim = latent.head_dim if latent else whole_or(config, "head_dim", family.head_dim or hidden_size // heads)
    bias = bool(config.get("attention_bias", family.attention_bias))
    rotated, windows = rotations_and_windows(config, layers, family)
    turned = latent.rotated if latent else head_dim
    rope, *local = [parse_rope(config, each, family, turned) for each in rope_dicts(config, family)]
    return DecoderConfig(
        model_type=config["model_type"],
        vocab_size=whole(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=whole(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=whole_or(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        norm_eps=config.get("layer_norm_eps", 1e-5) if family.centred else config.get("rms_norm_eps", 1e-6),
        tie_embeddings=bool(config.get("tie_word_embeddings", family.tie_embeddings)),
        qkv_bias=family.qkv_bias or bias,
        o_bias=bias and family.o_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=bool(config.get("use_qk_norm")) if family.own_qk_norm else family.qk_norm,
        rope=rope,
        local_rope=local[0] if local else None,
        rotated=rotated,
        windows=windows,
        family=family,
        factors=Factors(attention=_latent_scale(latent, rope)) if latent else _factors(config, family, hidden_size),
        experts=parse_experts(config, family, layers),
        caps=_caps(config, family),
        latent=latent,
    )


def _factors(config: dict[str, Any], family: Family, hidden_size: int) -> Factors:
    if not family.factors:
        scalar = config.get("query_pre_attn_scalar") or 0
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


def _latent_scale(sizes: LatentSizes, rope: RopeConfig) -> float:
    """Return the scale of scores: with scaled rope, YaRN's attention factor applies to queries and keys as a whole.

    That includes the dims that are not rotated."""
    factor = mscale(rope.factor, rope.mscale_all_dim) if rope.kind != "default" and rope.mscale_all_dim else 1.0
    return float(sizes.head_dim**-0.5 * factor**2)


def _caps(config: dict[str, Any], family: Family) -> Caps:
    """Return the caps. Gemma 2's defaults apply if the config has none; null means no cap."""
    if not family.capped:
        return Caps()
    attention, logits = config.get("attn_logit_softcapping", 50.0), config.get("final_logit_softcapping", 30.0)
    return Caps(float(attention or 0.0), float(logits or 0.0))

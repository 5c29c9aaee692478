"""Parameters of a decoder and their loader: embedding, layers (attention, MLP, experts, mixers), final norm, head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvferry.engine.models.expert_parameters import read_experts, read_gated
from kvferry.engine.models.interleaved import half_split
from kvferry.engine.models.mixer_parameters import read_mixer
from kvferry.engine.models.reader import TensorReader
from kvferry.kernels.activation import Activation, Kind
from kvferry.kernels.decoder_spec import (
    Experts,
    Gated,
    Gqa,
    Latent,
    LayerForm,
    Mixer,
    Ungated,
)
from kvferry.kernels.layer_norm import LayerNorm, Norm
from kvferry.kernels.linear import Linear
from kvferry.model_files.hybrid import HybridLayers
from kvferry.model_files.latent import LatentSizes

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Parameters:
    """Decoder's parameters on its device; head is the embedding if they are tied, unless it has a bias."""

    embedding: Linear
    layers: tuple[LayerForm, ...]
    norm: Norm
    head: Linear


class ParameterLoader:
    """Loader of one decoder's parameters. Raises ConfigError as its reader does."""

    def __init__(self, reader: TensorReader, progress: Progress | None = None):
        self._reader = reader
        self._config = reader.config
        self._progress = progress

    def load(self) -> Parameters:
        """Load the parameters."""
        config, reader = self._config, self._reader
        tied, scale = config.tie_embeddings, float(torch.tensor(config.factors.embedding, dtype=reader.dtype))
        words = [("model.embed_tokens.weight", config.vocab_size)]
        embedding = reader.linear(words, config.hidden_size, factor=scale)
        layers = []
        for index in range(config.num_layers):
            self._report(index)
            layers.append(self._layer(index))
        self._report(config.num_layers)
        of_logits = config.factors.logits / scale if tied else config.factors.logits
        norm = reader.norm("model.norm", config.hidden_size, of_logits)
        head = embedding if tied and not config.head_bias else self._head()
        if self._progress is not None:
            self._progress(1.0)
        return Parameters(embedding, tuple(layers), norm, head)

    def _head(self) -> Linear:
        config, reader = self._config, self._reader
        bias = reader.stack([("lm_head.bias", config.vocab_size)], None) if config.head_bias else None
        name = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
        return reader.linear([(name, config.vocab_size)], config.hidden_size, bias)

    def _report(self, layers_done: int) -> None:
        if self._progress is not None:
            self._progress((1 + layers_done) / (self._config.num_layers + 2))

    def _layer(self, index: int) -> LayerForm:
        config, reader, prefix = self._config, self._reader, f"model.layers.{index}"
        hidden, family = config.hidden_size, config.family
        before, behind = family.norm_before, family.norm_behind
        before_mlp, behind_attention, behind_mlp = family.names_behind
        before_mlp = before_mlp if behind else "post_attention_layernorm"
        hybrid = config.hybrid
        attends, has_mlp = hybrid is None or hybrid.attends(index), hybrid is None or hybrid.has_mlp(index)
        second = before and not config.parallel and (hybrid is None or not hybrid.single)
        return LayerForm(
            input_norm=reader.norm(f"{prefix}.input_layernorm", hidden) if before else None,
            attention=self._attention(index, f"{prefix}.self_attn") if attends else None,
            post_norm=reader.norm(f"{prefix}.{before_mlp}", hidden) if second else None,
            mlp=self._mlp(index, prefix) if has_mlp else None,
            mixer=self._mixer(index, hybrid) if hybrid and hybrid.recurs(index) else None,
            behind_attention=reader.norm(f"{prefix}.{behind_attention}", hidden) if behind else None,
            behind_mlp=reader.norm(f"{prefix}.{behind_mlp}", hidden) if behind else None,
            kept=config.kept(index),
        )

    def _mixer(self, index: int, hybrid: HybridLayers) -> Mixer:
        part = len(hybrid.sizes.states) * sum(map(hybrid.recurs, range(index)))
        return read_mixer(self._reader, hybrid.sizes, index, part)

    def _attention(self, index: int, prefix: str) -> Gqa | Latent:
        config, reader = self._config, self._reader
        if config.latent is not None:
            return read_latent(reader, config.latent, prefix)
        hidden, kv = config.hidden_size, config.kv_size
        qkv = [("q_proj", config.q_size * (1 + config.family.gated)), ("k_proj", kv), ("v_proj", kv)]
        if config.family.fused:
            qkv = [("qkv_proj", config.q_size + 2 * kv)]
        q_norm = self._norm_of_heads(index, f"{prefix}.q_norm", config.num_heads)
        k_norm = self._norm_of_heads(index, f"{prefix}.k_norm", config.num_kv_heads)
        q_scale = None
        if config.family.norms_rotated and isinstance(q_norm, torch.Tensor) and isinstance(k_norm, torch.Tensor):
            # A rotation keeps the length of a vector, so only the norms' weights come after it; those of k go to q.
            q_scale = (q_norm.float() * k_norm.float()).to(reader.dtype)
            q_norm = k_norm = torch.ones_like(q_norm)
        return Gqa(
            qkv=reader.dense(prefix, qkv, hidden, config.qkv_bias),
            q_norm=q_norm,
            k_norm=k_norm,
            o=reader.dense(prefix, [("o_proj", hidden)], config.q_size, config.o_bias, config.factors.residual),
            rotated=config.rotated[index],
            window=config.windows[index],
            sinks=reader.float32(f"{prefix}.sinks", config.num_heads) if config.family.sinks else None,
            q_scale=q_scale,
            gated=config.family.gated,
            tempered=config.temperature is not None and (config.family.tempered or not config.rotated[index]),
        )

    def _norm_of_heads(self, index: int, name: str, heads: int) -> Norm | None:
        family, dim = self._config.family, self._config.head_dim
        if not self._config.qk_norm or (family.chunked and not self._config.rotated[index]):
            return None
        if family.chunked:  # without weights, a norm before the rotation is the same as one after it
            return self._reader.ones(dim)
        if not family.own_qk_norm:
            return self._reader.rms_norm(name, heads * dim if family.wide_qk_norm else dim)
        out = self._reader.stack([(f"{name}.weight", heads)], dim)
        if family.interleaved:
            half_split(out.view(-1), dim, self._config.rope.dim)
        return LayerNorm(out)

    def _mlp(self, index: int, prefix: str) -> Gated | Ungated | Experts:
        config, reader = self._config, self._reader
        experts, names = config.experts, config.family.experts
        if experts is None or names is None or not experts.layers[index]:
            if config.activation is not None:
                return self._ungated(f"{prefix}.mlp", config.activation)
            parts = ("gate_up_proj",) if config.family.fused or config.family.fused_mlp else ("gate_proj", "up_proj")
            own, inner = f"{prefix}.{config.family.mlp}", self._width(index)
            return read_gated(reader, own, parts, "down_proj", inner, config.hidden_size, config.mlp_bias)
        return read_experts(reader, experts, names, prefix)

    def _width(self, index: int) -> int:
        """Return the width of a layer's MLP."""
        return self._config.intermediate_size

    def _ungated(self, prefix: str, kind: Kind) -> Ungated:
        config, reader = self._config, self._reader
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        activation = Activation(kind)
        if kind == "xielu":
            positive, negative = (float(F.softplus(reader.float32(f"{prefix}.act_fn.alpha_{s}", 1))) for s in "pn")
            beta, bound = (float(reader.float32(f"{prefix}.act_fn.{name}")) for name in ("beta", "eps"))
            activation = Activation(kind, positive, beta + negative, beta, bound)
        return Ungated(
            up=reader.dense(prefix, [("up_proj", inner)], hidden, bias),
            down=reader.dense(prefix, [("down_proj", hidden)], inner, bias, config.factors.residual),
            activation=activation,
        )


def read_latent(reader: TensorReader, sizes: LatentSizes, prefix: str) -> Latent:
    """Read the attention whose tensors have this prefix. Raises ConfigError as its reader does."""
    config, bias = reader.config, reader.config.qkv_bias
    hidden, heads = config.hidden_size, config.num_heads
    each = sizes.plain + sizes.value
    made = reader.stack([(f"{prefix}.kv_b_proj.weight", heads * each)], sizes.rank)
    of_k, of_v = torch.split(made.view(heads, each, sizes.rank), [sizes.plain, sizes.value], 1)
    ranked, name = sizes.query_rank, "q_b_proj" if sizes.query_rank else "q_proj"
    return Latent(
        q_a=reader.dense(prefix, [("q_a_proj", ranked)], hidden, bias) if ranked else None,
        q_norm=reader.rms_norm(f"{prefix}.q_a_layernorm", ranked) if ranked else None,
        q=reader.dense(prefix, [(name, config.q_size)], ranked or hidden, False),
        kv_a=reader.dense(prefix, [("kv_a_proj_with_mqa", sizes.cached)], hidden, bias),
        kv_norm=reader.rms_norm(f"{prefix}.kv_a_layernorm", sizes.rank),
        expand=reader.ops.linear(made),
        absorb=reader.ops.linear_of_heads(of_k.transpose(1, 2)),
        up_v=reader.ops.linear_of_heads(of_v),
        o=reader.dense(prefix, [("o_proj", hidden)], heads * sizes.value, config.o_bias),
        rotated=sizes.rotated,
        plain=sizes.plain,
        rank=sizes.rank,
        value=sizes.value,
    )

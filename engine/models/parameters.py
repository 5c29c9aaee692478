"""Loading of a decoder's parameters: embedding, layers, final norm and head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvferry.engine.models.families import ExpertNames
from kvferry.engine.models.interleaved import half_split
from kvferry.engine.models.latent import read_latent
from kvferry.engine.models.reader import TensorReader
from kvferry.kernels.decoder_spec import Experts, Gated, Gqa, Latent, LayerForm, Linear

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Parameters:
    """Decoder's parameters on its device; head is the embedding if they are tied."""

    embedding: Linear
    layers: tuple[LayerForm, ...]
    norm: torch.Tensor
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
        head = embedding if tied else reader.linear([("lm_head.weight", config.vocab_size)], config.hidden_size)
        if self._progress is not None:
            self._progress(1.0)
        return Parameters(embedding, tuple(layers), norm, head)

    def _report(self, layers_done: int) -> None:
        if self._progress is not None:
            self._progress((1 + layers_done) / (self._config.num_layers + 2))

    def _layer(self, index: int) -> LayerForm:
        config, reader, prefix = self._config, self._reader, f"model.layers.{index}"
        hidden, family = config.hidden_size, config.family
        before, behind = family.norm_before, family.norm_behind
        before_mlp, behind_attention, behind_mlp = family.names_behind
        before_mlp = before_mlp if behind else "post_attention_layernorm"
        return LayerForm(
            input_norm=reader.norm(f"{prefix}.input_layernorm", hidden) if before else None,
            attention=self._attention(index, f"{prefix}.self_attn"),
            post_norm=reader.norm(f"{prefix}.{before_mlp}", hidden) if before and not family.parallel else None,
            mlp=self._mlp(index, prefix),
            behind_attention=reader.norm(f"{prefix}.{behind_attention}", hidden) if behind else None,
            behind_mlp=reader.norm(f"{prefix}.{behind_mlp}", hidden) if behind else None,
        )

    def _attention(self, index: int, prefix: str) -> Gqa | Latent:
        config, reader = self._config, self._reader
        if config.latent is not None:
            return read_latent(reader, config.latent, prefix)
        hidden, kv = config.hidden_size, config.kv_size
        qkv = [("q_proj", config.q_size), ("k_proj", kv), ("v_proj", kv)]
        if config.family.fused:
            qkv = [("qkv_proj", config.q_size + 2 * kv)]
        return Gqa(
            qkv=reader.dense(prefix, qkv, hidden, config.qkv_bias),
            q_norm=self._norm_of_heads(f"{prefix}.q_norm", config.num_heads) if config.qk_norm else None,
            k_norm=self._norm_of_heads(f"{prefix}.k_norm", config.num_kv_heads) if config.qk_norm else None,
            o=reader.dense(prefix, [("o_proj", hidden)], config.q_size, config.o_bias, config.factors.residual),
            rotated=config.rotated[index],
            window=config.windows[index],
            sinks=reader.float32(f"{prefix}.sinks", config.num_heads) if config.family.sinks else None,
        )

    def _norm_of_heads(self, name: str, heads: int) -> torch.Tensor:
        family, dim = self._config.family, self._config.head_dim
        if not family.own_qk_norm:
            return self._reader.norm(name, heads * dim if family.wide_qk_norm else dim)
        out = self._reader.stack([(f"{name}.weight", heads)], dim)
        if family.interleaved:
            half_split(out.view(-1), dim, self._config.rope.dim)
        return out

    def _mlp(self, index: int, prefix: str) -> Gated | Experts:
        config, reader = self._config, self._reader
        experts, names = config.experts, config.family.experts
        if experts is None or names is None or not experts.layers[index]:
            parts = ("gate_up_proj",) if config.family.fused or config.family.fused_mlp else ("gate_proj", "up_proj")
            return self._gated(f"{prefix}.mlp", parts, "down_proj", config.intermediate_size)
        name = f"{prefix}.{names.router}"
        router = self._router(name, names, experts.count)
        shared = (names.gate, names.up), names.down, experts.shared
        each = tuple(
            self._gated(f"{prefix}.{names.experts}.{each}", (names.gate, names.up), names.down, experts.size)
            if each in experts.held
            else None
            for each in range(experts.count)
        )
        grouped = reader.ops.grouped(each)
        return Experts(
            router=router,
            each=each if grouped is None else grouped.each,
            grouped=grouped,
            routing=experts.routing,
            correction=reader.float32(f"{name}.e_score_correction_bias", experts.count) if names.sigmoid else None,
            shared=self._gated(f"{prefix}.{names.shared}", *shared) if experts.shared else None,
        )

    def _router(self, name: str, names: ExpertNames, count: int) -> Linear:
        reader, hidden = self._reader, self._config.hidden_size
        if names.precise:
            return reader.ops.linear(reader.float32(f"{name}.weight", count, hidden))
        bias = reader.stack([(f"{name}.bias", count)], None) if names.biased else None
        return reader.ops.linear(reader.stack([(f"{name}.weight", count)], hidden), bias)

    def _gated(self, prefix: str, parts: tuple[str, ...], down: str, inner: int) -> Gated:
        """Load an MLP. parts: names of gate and up, or of both in one tensor. inner: its width."""
        hidden, experts = self._config.hidden_size, self._config.family.experts
        bias = self._config.mlp_bias if experts is None else experts.biased
        gate_up = [(part, 2 * inner // len(parts)) for part in parts]
        return Gated(
            gate_up=self._reader.dense(prefix, gate_up, hidden, bias),
            down=self._reader.dense(prefix, [(down, hidden)], inner, bias, self._config.factors.residual),
        )

"""The tensors of a decoder: read, checked, laid together and placed on its device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.models.config import DecoderConfig
from engine.models.dense_forms import DenseForms
from engine.models.interleaved import ROTATED, half_split
from engine.models.weights import Weights
from kernels.ops import Ops
from kernels.step import Experts, Gated, LayerForm, Linear, StoredRows
from protocol.errors import ConfigError

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a decoder reads on its device; head is the embedding where they are tied."""

    embedding: Linear
    layers: tuple[LayerForm, ...]
    norm: torch.Tensor
    head: Linear


class ParameterLoader:
    """Reads, checks, fuses and places the tensors of one decoder. quantization, kept: see `DenseForms`. Raises
    ConfigError: a tensor is missing or has another shape than the config says, or the device's memory does not hold
    them."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype,
        ops: Ops,
        progress: Progress | None = None,
        quantization: str = "none",
    ):
        self._config = config
        self._weights = weights
        self._device = device
        self._dtype = dtype
        self._ops = ops
        self._progress = progress
        self._forms = DenseForms(ops, quantization)
        self.kept = self._forms.kept

    def load(self) -> Parameters:
        config = self._config
        try:
            tied, scale = config.tie_embeddings, float(torch.tensor(config.factors.embedding, dtype=self._dtype))
            words = [("model.embed_tokens.weight", config.vocab_size)]
            embedding = self._linear(words, config.hidden_size, factor=scale)
            layers = []
            for index in range(config.num_layers):
                self._report(index)
                layers.append(self._layer(index))
            self._report(config.num_layers)
            of_logits = config.factors.logits / scale if tied else config.factors.logits
            norm = self._norm("model.norm", config.hidden_size, of_logits)
            head = embedding if tied else self._linear([("lm_head.weight", config.vocab_size)], config.hidden_size)
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"the model's weights do not fit the memory of {self._device}", param="model") from error
        if self._progress is not None:
            self._progress(1.0)
        return Parameters(embedding, tuple(layers), norm, head)

    def _report(self, layers_done: int) -> None:
        if self._progress is not None:
            self._progress((1 + layers_done) / (self._config.num_layers + 2))

    def _layer(self, index: int) -> LayerForm:
        config, prefix = self._config, f"model.layers.{index}"
        hidden, kv = config.hidden_size, config.kv_size
        qkv = [("self_attn.q_proj", config.q_size), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)]
        if config.family.fused:
            qkv = [("self_attn.qkv_proj", config.q_size + 2 * kv)]
        added = config.factors.residual
        before, behind = config.family.norm_before, config.family.norm_behind
        before_mlp, behind_attention, behind_mlp = config.family.names_behind
        before_mlp = before_mlp if behind else "post_attention_layernorm"
        return LayerForm(
            input_norm=self._norm(f"{prefix}.input_layernorm", hidden) if before else None,
            qkv=self._dense(prefix, qkv, hidden, config.qkv_bias),
            q_norm=self._norm_of_heads(f"{prefix}.self_attn.q_norm", config.num_heads) if config.qk_norm else None,
            k_norm=self._norm_of_heads(f"{prefix}.self_attn.k_norm", config.num_kv_heads) if config.qk_norm else None,
            o=self._dense(prefix, [("self_attn.o_proj", hidden)], config.q_size, config.o_bias, added),
            post_norm=self._norm(f"{prefix}.{before_mlp}", hidden) if before and not config.family.parallel else None,
            mlp=self._mlp(index, prefix),
            rotated=config.rotated[index],
            window=config.windows[index],
            behind_attention=self._norm(f"{prefix}.{behind_attention}", hidden) if behind else None,
            behind_mlp=self._norm(f"{prefix}.{behind_mlp}", hidden) if behind else None,
            sinks=self._sinks(prefix) if config.family.sinks else None,
        )

    def _mlp(self, index: int, prefix: str) -> Gated | Experts:
        config, experts, names = self._config, self._config.experts, self._config.family.experts
        if experts is None or names is None or not experts.layers[index]:
            parts = ("gate_up_proj",) if config.family.fused or config.family.fused_mlp else ("gate_proj", "up_proj")
            return self._gated(f"{prefix}.mlp", parts, "down_proj", config.intermediate_size)
        router = self._stack([(f"{prefix}.{names.router}.weight", experts.count)], config.hidden_size)
        bias = self._stack([(f"{prefix}.{names.router}.bias", experts.count)], None) if names.biased else None
        return Experts(
            router=self._ops.linear(router, bias),
            each=tuple(
                self._gated(f"{prefix}.{names.experts}.{each}", (names.gate, names.up), names.down, experts.size)
                for each in range(experts.count)
            ),
            chosen=experts.chosen,
            renormalised=experts.renormalised,
        )

    def _gated(self, prefix: str, parts: tuple[str, ...], down: str, inner: int) -> Gated:
        """parts: names of gate and up, or of both in one tensor; inner: the MLP's width."""
        hidden, experts = self._config.hidden_size, self._config.family.experts
        bias = self._config.mlp_bias if experts is None else experts.biased
        gate_up = [(part, 2 * inner // len(parts)) for part in parts]
        return Gated(
            gate_up=self._dense(prefix, gate_up, hidden, bias),
            down=self._dense(prefix, [(down, hidden)], inner, bias, self._config.factors.residual),
        )

    def _dense(
        self, prefix: str, parts: list[tuple[str, int]], columns: int, bias: bool, factor: float = 1.0
    ) -> Linear:
        biases = self._stack([(f"{prefix}.{name}.bias", rows) for name, rows in parts], None, factor) if bias else None
        return self._linear([(f"{prefix}.{name}.weight", rows) for name, rows in parts], columns, biases, factor)

    def _linear(
        self, parts: list[tuple[str, int]], columns: int, bias: torch.Tensor | None = None, factor: float = 1.0
    ) -> Linear:
        """The layer in the form that `quantization` names, where the operations run it; else in the decoder's dtype."""
        if self._forms.as_stored and factor == 1.0:
            stored = [(name, self._weights.stored(name, (rows, columns))) for name, rows in parts]
            kept = [self._reordered(name, rows) for name, rows in stored if rows is not None]
            if len(kept) == len(parts) and (packed := self._forms.of_rows(kept, columns, bias)) is not None:
                return packed
        return self._forms.of_weight(self._stack(parts, columns, factor), bias)

    def _norm(self, name: str, size: int, factor: float = 1.0) -> torch.Tensor:
        """Weights of a norm; what a family adds to them is added in float32."""
        out = self._stack([(f"{name}.weight", size)], None)
        if (offset := self._config.family.norm_offset) or factor != 1.0:
            out = ((out.float() + offset) * factor).to(self._dtype)
        return out

    def _norm_of_heads(self, name: str, heads: int) -> torch.Tensor:
        family, dim = self._config.family, self._config.head_dim
        if not family.own_qk_norm:
            return self._norm(name, heads * dim if family.wide_qk_norm else dim)
        out = self._stack([(f"{name}.weight", heads)], dim)
        if family.interleaved:
            half_split(out.view(-1), dim, self._config.rope.dim)
        return out

    def _stack(self, parts: list[tuple[str, int]], columns: int | None, factor: float = 1.0) -> torch.Tensor:
        """Tensors of (name, rows) laid under each other: [sum of rows, columns], or one-dimensional. factor: what they
        are multiplied with in place of what comes out of them."""
        tail = () if columns is None else (columns,)
        out = torch.empty(sum(rows for _, rows in parts), *tail, dtype=self._dtype, device=self._device)
        start = 0
        for name, rows in parts:
            self._weights.read(name, part := out[start : start + rows])
            self._reorder(name, part)
            start += rows
        return out if factor == 1.0 else out.mul_(factor)

    def _sinks(self, prefix: str) -> torch.Tensor:
        out = torch.empty(self._config.num_heads, dtype=torch.float32, device=self._device)
        self._weights.read(f"{prefix}.self_attn.sinks", out)
        return out

    def _reordered(self, name: str, rows: StoredRows) -> StoredRows:
        self._reorder(name, rows.data)
        return rows

    def _reorder(self, name: str, rows: torch.Tensor) -> None:
        """Those of q and k, in place, where the family's rotation pairs neighbours."""
        if self._config.family.interleaved and any(each in name for each in ROTATED):
            half_split(rows, self._config.head_dim, self._config.rope.dim)

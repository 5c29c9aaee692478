"""The decoder of the Llama family, driven by its config: embedding, layers of attention and gated MLP, final norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from engine.models.base import Halfway, Model, ModelInfo, Unwanted, Wanted, always
from engine.models.config import DecoderConfig
from engine.models.weights import Weights
from kernels.ops import Ops
from kernels.plan import BatchPlan
from kernels.step import DecoderForm, LayerForm, Linear, NextLogits, StoredRows
from protocol.errors import ConfigError

Progress = Callable[[float], None]


class Decoder(Model):
    """A `Model`. rope: cos and sin, float32 [longest sequence, rotary_dim / 2]."""

    resumable = True

    def __init__(
        self,
        config: DecoderConfig,
        info: ModelInfo,
        parameters: Parameters,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Ops,
    ):
        self.config = config
        self.info = info
        self.dtype = parameters.norm.dtype
        self.device = parameters.norm.device
        self.parameters = parameters
        self._cos, self._sin = rope
        self.ops = ops
        self._scale = config.factors.attention or config.head_dim**-0.5
        self._step = ops.record(self._form())

    def _form(self) -> DecoderForm:
        config, parameters = self.config, self.parameters
        return DecoderForm(
            embedding=parameters.embedding,
            layers=parameters.layers,
            norm=parameters.norm,
            head=parameters.head,
            cos=self._cos,
            sin=self._sin,
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            scale=self._scale,
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        kv: torch.Tensor,
        plan: BatchPlan,
        wanted: Wanted = always,
        halfway: Halfway | None = None,
    ) -> torch.Tensor:
        if self._step is not None and not plan.adapted and self._step.takes(plan, kv):
            return self._step(token_ids, kv, plan)
        ops, eps = self.ops, self.config.rms_norm_eps
        layers = self.parameters.layers
        if halfway is None:
            residual = self.parameters.embedding.rows(token_ids)
            halfway = Halfway(0, ops.rms_norm(residual, layers[0].input_norm, eps), residual)
        first, x, residual = halfway.layer, halfway.x, halfway.residual
        for index, layer in enumerate(layers[first:], first):
            if index > first and not wanted():
                raise Unwanted(Halfway(index, x, residual))
            x = self._attention(index, x, kv[:, index], plan)
            x, residual = ops.add_rms_norm(x, residual, layer.post_norm, eps)
            x = self._dense(index, "down", ops.silu_mul(self._dense(index, "gate_up", x, plan)), plan)
            following = layers[index + 1].input_norm if index + 1 < len(layers) else self.parameters.norm
            x, residual = ops.add_rms_norm(x, residual, following, eps)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.parameters.head(hidden, torch.float32)

    def next_logits(self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan) -> NextLogits:
        if self._step is not None and not plan.adapted and self._step.takes(plan, kv):
            return self._step.logits(token_ids, kv, plan)
        return super().next_logits(token_ids, kv, plan)

    def dense_layers(self) -> Iterator[Linear]:
        """All of them, the vocabulary projection last."""
        for layer in self.parameters.layers:
            yield from (layer.qkv, layer.o, layer.gate_up, layer.down)
        yield self.parameters.head

    def _dense(self, index: int, name: str, x: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """The dense layer `name` of layer `index`, and what the adapters of the batch add to it."""
        linear: Linear = getattr(self.parameters.layers[index], name)
        y = linear(x)
        for adapter, tokens in ((each.adapter, each.tokens) for each in plan.adapted):
            if parts := adapter.layers[index].get(name):
                self.ops.add_low_rank(y, x, tokens, parts)
        return y

    def _attention(self, index: int, x: torch.Tensor, kv_layer: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        config, ops, layer = self.config, self.ops, self.parameters.layers[index]
        sizes = [config.q_size, config.kv_size, config.kv_size]
        qkv = self._dense(index, "qkv", x, plan)
        q, k, v = (part.view(len(x), -1, config.head_dim) for part in torch.split(qkv, sizes, dim=1))
        if layer.q_norm is not None and layer.k_norm is not None:
            q = ops.rms_norm(q, layer.q_norm, config.rms_norm_eps)
            k = ops.rms_norm(k, layer.k_norm, config.rms_norm_eps)
        cos, sin = (self._cos, self._sin) if layer.rotated else (None, None)
        q = ops.rope_and_cache(q, k, v, cos, sin, kv_layer, plan)
        out = ops.paged_attention(q, kv_layer, plan, self._scale, layer.window)
        return self._dense(index, "o", out.flatten(1), plan)


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a decoder reads on its device; head is the embedding where they are tied."""

    embedding: Linear
    layers: tuple[LayerForm, ...]
    norm: torch.Tensor
    head: Linear


class ParameterLoader:
    """Reads, checks, fuses and places the tensors of one decoder. quantization: see `load_model`; `kept`: the kinds of
    stored rows that run packed. Raises ConfigError: a tensor is missing or has another shape than the config says, or
    the device's memory does not hold them."""

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
        self._quantization = quantization
        self.kept: set[str] = set()

    def load(self) -> Parameters:
        config = self._config
        try:
            factors, tied = config.factors, config.tie_embeddings
            embedding = self._linear(
                [("model.embed_tokens.weight", config.vocab_size)], config.hidden_size, factor=factors.embedding
            )
            layers = []
            for index in range(config.num_layers):
                self._report(index)
                layers.append(self._layer(index))
            self._report(config.num_layers)
            of_logits = factors.logits / factors.embedding if tied else factors.logits
            norm = self._stack([("model.norm.weight", config.hidden_size)], None, of_logits)
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
        hidden, inner, kv = config.hidden_size, config.intermediate_size, config.kv_size
        qkv = [("self_attn.q_proj", config.q_size), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)]
        gate_up = [("mlp.gate_proj", inner), ("mlp.up_proj", inner)]
        if config.fused:
            qkv = [("self_attn.qkv_proj", config.q_size + 2 * kv)]
            gate_up = [("mlp.gate_up_proj", 2 * inner)]
        added = config.factors.residual
        q_norm, k_norm = f"{prefix}.self_attn.q_norm.weight", f"{prefix}.self_attn.k_norm.weight"
        return LayerForm(
            input_norm=self._vector(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._dense(prefix, qkv, hidden, config.qkv_bias),
            q_norm=self._vector(q_norm, config.head_dim) if config.qk_norm else None,
            k_norm=self._vector(k_norm, config.head_dim) if config.qk_norm else None,
            o=self._dense(prefix, [("self_attn.o_proj", hidden)], config.q_size, config.o_bias, added),
            post_norm=self._vector(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=self._dense(prefix, gate_up, hidden, config.mlp_bias),
            down=self._dense(prefix, [("mlp.down_proj", hidden)], inner, config.mlp_bias, added),
            rotated=config.rotated[index],
            window=config.windows[index],
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
        if self._quantization == "auto" and factor == 1.0:
            stored = [self._weights.stored(name, (rows, columns)) for name, rows in parts]
            kept = [rows for rows in stored if rows is not None]
            if len(kept) == len(parts) and (packed := self._packed(kept, columns, bias)) is not None:
                return packed
        weight = self._stack(parts, columns, factor)
        if self._quantization == "int8":
            quantised = [StoredRows("INT8", weight.view(torch.uint8))]
            if (packed := self._packed(quantised, columns, bias)) is not None:
                return packed
        return self._ops.linear(weight, bias)

    def _packed(self, parts: list[StoredRows], columns: int, bias: torch.Tensor | None) -> Linear | None:
        packed = self._ops.packed(parts, columns, bias)
        if packed is not None:
            self.kept.update(part.kind for part in parts)
        return packed

    def _vector(self, name: str, size: int) -> torch.Tensor:
        return self._stack([(name, size)], None)

    def _stack(self, parts: list[tuple[str, int]], columns: int | None, factor: float = 1.0) -> torch.Tensor:
        """Tensors of (name, rows) laid under each other: [sum of rows, columns], or one-dimensional. factor: what they
        are multiplied with in place of what comes out of them."""
        tail = () if columns is None else (columns,)
        out = torch.empty(sum(rows for _, rows in parts), *tail, dtype=self._dtype, device=self._device)
        start = 0
        for name, rows in parts:
            self._weights.read(name, out[start : start + rows])
            start += rows
        return out if factor == 1.0 else out.mul_(factor)

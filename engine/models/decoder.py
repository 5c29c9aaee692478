"""The decoder of the Llama family, driven by its config: embedding, layers of attention and gated MLP, final norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.models.base import ModelInfo
from engine.models.config import DecoderConfig
from engine.models.weights import Weights
from kernels.ops import Ops
from kernels.plan import BatchPlan
from protocol.errors import ConfigError

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Dense:
    """y = x @ weight.T + bias; weight [out, in]."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Layer:
    """qkv and gate_up are fused, in that order of rows. q_norm and k_norm [head_dim]: Qwen3's norm of each head."""

    input_norm: torch.Tensor
    qkv: Dense
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Dense
    post_norm: torch.Tensor
    gate_up: Dense
    down: Dense


class Decoder:
    """A `Model`. cos and sin: float32 [max_model_len, rotary_dim / 2]."""

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
        self.dtype = parameters.embedding.dtype
        self.device = parameters.embedding.device
        self.parameters = parameters
        self._cos, self._sin = rope
        self._ops = ops
        self._scale = config.head_dim**-0.5

    def forward(self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        ops, eps = self._ops, self.config.rms_norm_eps
        layers = self.parameters.layers
        residual = F.embedding(token_ids, self.parameters.embedding)
        x = ops.rms_norm(residual, layers[0].input_norm, eps)
        for index, layer in enumerate(layers):
            x = self._attention(index, layer, x, kv[:, index], plan)
            x, residual = ops.add_rms_norm(x, residual, layer.post_norm, eps)
            x = layer.down(ops.silu_mul(layer.gate_up(x)))
            following = layers[index + 1].input_norm if index + 1 < len(layers) else self.parameters.norm
            x, residual = ops.add_rms_norm(x, residual, following, eps)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.parameters.head).float()

    def _attention(
        self, index: int, layer: Layer, x: torch.Tensor, kv_layer: torch.Tensor, plan: BatchPlan
    ) -> torch.Tensor:
        config, ops = self.config, self._ops
        sizes = [config.q_size, config.kv_size, config.kv_size]
        q, k, v = (part.view(len(x), -1, config.head_dim) for part in torch.split(layer.qkv(x), sizes, dim=1))
        if layer.q_norm is not None and layer.k_norm is not None:
            q = ops.rms_norm(q, layer.q_norm, config.rms_norm_eps)
            k = ops.rms_norm(k, layer.k_norm, config.rms_norm_eps)
        cos, sin = (self._cos, self._sin) if config.rotated[index] else (None, None)
        q = ops.rope_and_cache(q, k, v, cos, sin, kv_layer, plan)
        out = ops.paged_attention(q, kv_layer, plan, self._scale, config.windows[index])
        return layer.o(out.flatten(1))


@dataclass(frozen=True, slots=True)
class Parameters:
    """All tensors of a decoder on its device; head is the embedding where they are tied."""

    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: torch.Tensor


class ParameterLoader:
    """Reads, checks, fuses and places the tensors of one decoder. Raises ConfigError: a tensor is missing or has
    another shape than the config says, or the device's memory does not hold them."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None = None,
    ):
        self._config = config
        self._weights = weights
        self._device = device
        self._dtype = dtype
        self._progress = progress

    def load(self) -> Parameters:
        config = self._config
        try:
            embedding = self._stack([("model.embed_tokens.weight", config.vocab_size)], config.hidden_size)
            layers = []
            for index in range(config.num_layers):
                self._report(index)
                layers.append(self._layer(f"model.layers.{index}"))
            self._report(config.num_layers)
            norm = self._vector("model.norm.weight", config.hidden_size)
            tied = config.tie_embeddings
            head = embedding if tied else self._stack([("lm_head.weight", config.vocab_size)], config.hidden_size)
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"the model's weights do not fit the memory of {self._device}", param="model") from error
        if self._progress is not None:
            self._progress(1.0)
        return Parameters(embedding, tuple(layers), norm, head)

    def _report(self, layers_done: int) -> None:
        if self._progress is not None:
            self._progress((1 + layers_done) / (self._config.num_layers + 2))

    def _layer(self, prefix: str) -> Layer:
        config = self._config
        hidden, inner, kv = config.hidden_size, config.intermediate_size, config.kv_size
        qkv = [("self_attn.q_proj", config.q_size), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)]
        gate_up = [("mlp.gate_proj", inner), ("mlp.up_proj", inner)]
        q_norm, k_norm = f"{prefix}.self_attn.q_norm.weight", f"{prefix}.self_attn.k_norm.weight"
        return Layer(
            input_norm=self._vector(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._dense(prefix, qkv, hidden, config.qkv_bias),
            q_norm=self._vector(q_norm, config.head_dim) if config.qk_norm else None,
            k_norm=self._vector(k_norm, config.head_dim) if config.qk_norm else None,
            o=self._dense(prefix, [("self_attn.o_proj", hidden)], config.q_size, config.o_bias),
            post_norm=self._vector(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=self._dense(prefix, gate_up, hidden, config.mlp_bias),
            down=self._dense(prefix, [("mlp.down_proj", hidden)], inner, config.mlp_bias),
        )

    def _dense(self, prefix: str, parts: list[tuple[str, int]], columns: int, bias: bool) -> Dense:
        weight = self._stack([(f"{prefix}.{name}.weight", rows) for name, rows in parts], columns)
        biases = self._stack([(f"{prefix}.{name}.bias", rows) for name, rows in parts], None) if bias else None
        return Dense(weight, biases)

    def _vector(self, name: str, size: int) -> torch.Tensor:
        return self._stack([(name, size)], None)

    def _stack(self, parts: list[tuple[str, int]], columns: int | None) -> torch.Tensor:
        """Tensors of (name, rows) laid under each other: [sum of rows, columns], or one-dimensional."""
        tail = () if columns is None else (columns,)
        out = torch.empty(sum(rows for _, rows in parts), *tail, dtype=self._dtype, device=self._device)
        start = 0
        for name, rows in parts:
            self._weights.read(name, out[start : start + rows])
            start += rows
        return out

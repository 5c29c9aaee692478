"""The decoder of the Llama family, driven by its config: embedding, layers of attention and gated MLP, final norm."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.models.base import Halfway, Model, ModelInfo, Unwanted, Wanted, always
from engine.models.config import DecoderConfig
from engine.models.parameters import Parameters
from kernels.ops import Ops
from kernels.plan import BatchPlan
from kernels.step import DecoderForm, Linear, NextLogits


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

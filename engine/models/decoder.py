"""Decoder of the Llama family and its relatives, driven by its config.

It stacks embedding, layers of attention and gated MLP or experts with their norms, and a final norm."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kvferry.engine.models.base import ForwardAbandoned, Model, ModelInfo, SuspendedPass, Wanted
from kvferry.engine.models.config import DecoderConfig
from kvferry.engine.models.parameters import Parameters
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.decoder_spec import DecoderForm, Experts, Latent, Linear
from kvferry.kernels.decoder_step import Halted, NextLogits, always
from kvferry.kernels.experts import mixture
from kvferry.kernels.gated_activation import GELU, SILU, Gate
from kvferry.kernels.layer_norm import layer_norm
from kvferry.kernels.ops import Ops


class Decoder(Model):
    """Implements `engine.models.base.Model`.

    rope: cos and sin, float32 [longest sequence, rotary_dim / 2]. local: those of layers with a window, if different.
    """

    resumable = True

    def __init__(
        self,
        config: DecoderConfig,
        info: ModelInfo,
        parameters: Parameters,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Ops,
        local: tuple[torch.Tensor, torch.Tensor] | None = None,
    ):
        self.config = config
        self.info = info
        self.dtype = parameters.norm.dtype
        self.device = parameters.norm.device
        self.parameters = parameters
        self._rope, self._local = rope, local or rope
        self.ops = ops
        self._activated = partial(ops.gate_mul, gate=_gate(config))
        self._scale = config.factors.attention or config.head_dim**-0.5
        self._step = ops.record(self._form(), self._one_by_one)

    def _form(self) -> DecoderForm:
        config, parameters = self.config, self.parameters
        return DecoderForm(
            embedding=parameters.embedding,
            layers=parameters.layers,
            norm=parameters.norm,
            head=parameters.head,
            cos=self._rope[0],
            sin=self._rope[1],
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.norm_eps,
            scale=self._scale,
            logits=self.logits,
            plain=config.plain,
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        kv: torch.Tensor,
        plan: BatchPlan,
        wanted: Wanted = always,
        halfway: SuspendedPass | None = None,
    ) -> torch.Tensor:
        if self._step is not None and halfway is None and not plan.adapted and self._step.takes(plan, kv):
            try:
                return self._step(token_ids, kv, plan, wanted)
            except Halted as halted:
                x = self._normed(halted.residual, self.parameters.layers[halted.layer].input_norm)
                raise ForwardAbandoned(SuspendedPass(halted.layer, x, halted.residual)) from None
        return self._one_by_one(token_ids, kv, plan, wanted, halfway)

    def _one_by_one(
        self,
        token_ids: torch.Tensor,
        kv: torch.Tensor,
        plan: BatchPlan,
        wanted: Wanted = always,
        halfway: SuspendedPass | None = None,
    ) -> torch.Tensor:
        layers = self.parameters.layers
        if halfway is None:
            residual = self.parameters.embedding.rows(token_ids)
            halfway = SuspendedPass(0, self._normed(residual, layers[0].input_norm), residual)
        first, x, residual = halfway.layer, halfway.x, halfway.residual
        for index, layer in enumerate(layers[first:], first):
            if index > first and not wanted():
                raise ForwardAbandoned(SuspendedPass(index, x, residual))
            attended = self._attention(index, x, kv[:, index], plan)
            if self.config.family.parallel:
                x = attended + self._mlp(index, x, plan)
            else:
                x, residual = self._added(attended, residual, layer.behind_attention, layer.post_norm)
                x = self._mlp(index, x, plan)
            following = layers[index + 1].input_norm if index + 1 < len(layers) else self.parameters.norm
            x, residual = self._added(x, residual, layer.behind_mlp, following)
        return x

    def _added(
        self, x: torch.Tensor, residual: torch.Tensor, behind: torch.Tensor | None, before: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the output of attention or MLP to the residual; return the next input and the new residual.

        behind: norm of that output. before: norm of the next input."""
        x = self._normed(x, behind)
        if before is not None and not self.config.family.centred:
            return self.ops.add_rms_norm(x, residual, before, self.config.norm_eps)
        residual = residual + x
        return self._normed(residual, before), residual

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits, cap = self.parameters.head(hidden, torch.float32), self.config.caps.logits
        return (logits / cap).tanh_().mul_(cap) if cap else logits

    def next_logits(self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan) -> NextLogits:
        if self._step is not None and not plan.adapted and self._step.takes(plan, kv):
            return self._step.logits(token_ids, kv, plan)
        return super().next_logits(token_ids, kv, plan)

    def dense_layers(self) -> Iterator[Linear]:
        """Yield all of them, the vocabulary projection last."""
        for layer in self.parameters.layers:
            yield from layer.dense_layers()
        yield self.parameters.head

    def _dense(self, linear: Linear, index: int, name: str, x: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """Return the dense layer called `name` in layer `index`, and what the adapters of the batch add to it."""
        y = linear(x)
        for adapter, tokens in ((each.adapter, each.tokens) for each in plan.adapted):
            if parts := adapter.layers[index].get(name):
                self.ops.add_low_rank(y, x, tokens, parts)
        return y

    def _attention(self, index: int, x: torch.Tensor, kv_layer: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        config, ops, own = self.config, self.ops, self.parameters.layers[index].attention
        if isinstance(own, Latent):
            return self._latent_attention(own, x, kv_layer, plan)
        sizes = [config.q_size, config.kv_size, config.kv_size]
        qkv = self._dense(own.qkv, index, "qkv", x, plan)
        q, k, v = torch.split(qkv, sizes, dim=1)
        if own.normed is not None:
            q, k = own.normed(q, k)
        elif config.family.wide_qk_norm:
            q, k = self._normed(q, own.q_norm), self._normed(k, own.k_norm)
        q, k, v = (part.view(len(x), -1, config.head_dim) for part in (q, k, v))
        if not config.family.wide_qk_norm:
            q, k = self._normed(q, own.q_norm), self._normed(k, own.k_norm)
        cos, sin = (self._local if own.window else self._rope) if own.rotated else (None, None)
        q = ops.rope_and_cache(q, k, v, cos, sin, kv_layer, plan)
        out = ops.paged_attention(q, kv_layer, plan, self._scale, own.window, config.caps.attention, own.sinks)
        return self._dense(own.o, index, "o", out.flatten(1), plan)

    def _latent_attention(self, own: Latent, x: torch.Tensor, kv_layer: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        ops, made_of = self.ops, x
        if own.q_a is not None and own.q_norm is not None:
            made_of = ops.rms_norm(own.q_a(x), own.q_norm, own.eps)
        q = own.q(made_of).view(len(x), -1, own.rotated + own.plain)
        key, latent = torch.split(own.kv_a(x), [own.rotated, own.rank], 1)
        cached = torch.cat((key, ops.rms_norm(latent, own.kv_norm, own.eps)), 1)
        q = ops.rope_and_cache(q, cached[:, None], None, *self._rope, kv_layer, plan)
        own.awaited()
        return own.o(ops.latent_attention(q, kv_layer, plan, self._scale, own).flatten(1))

    def _mlp(self, index: int, x: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        mlp = self.parameters.layers[index].mlp
        if isinstance(mlp, Experts):
            return mixture(mlp, x, self._activated)
        inner = self._activated(self._dense(mlp.gate_up, index, "gate_up", x, plan))
        return self._dense(mlp.down, index, "down", inner, plan)

    def _normed(self, x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        if norm is None:
            return x
        return (layer_norm if self.config.family.centred else self.ops.rms_norm)(x, norm, self.config.norm_eps)


def _gate(config: DecoderConfig) -> Gate:
    if config.experts is not None and config.experts.gate is not None:
        return config.experts.gate
    return GELU if config.family.gelu else SILU

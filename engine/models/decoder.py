"""Decoder: our own decoder of the Llama family and its relatives, driven by a DecoderConfig; implements Model.

It stacks embedding, layers of attention or recurrent mixers and gated MLP or experts, and a final norm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from kvferry.engine.models.base import ForwardAbandoned, KeepGoing, Model, ModelInfo, SuspendedPass
from kvferry.engine.models.config import DecoderConfig
from kvferry.engine.models.decoder_form import activation_of, decoder_form, layer_places
from kvferry.engine.models.latent_attention import latent_attention
from kvferry.engine.models.layer_inputs import Inputs
from kvferry.engine.models.media_inputs import embedded
from kvferry.engine.models.mixers import Mixers
from kvferry.engine.models.parameters import Parameters
from kvferry.engine.models.rotations import Rotations
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.decoder_spec import Experts, Latent, Ungated
from kvferry.kernels.decoder_step import Halted, NextLogits, Step, always
from kvferry.kernels.experts import mixture
from kvferry.kernels.layer_norm import LayerNorm, Norm
from kvferry.kernels.linear import Linear
from kvferry.kernels.ops import Ops
from kvferry.kernels.pool_views import layer_view
from kvferry.kernels.sequence_state import StateLayout
from kvferry.protocol.layer_groups import LayerGroups


class Decoder(Model):
    """Implements `engine.models.base.Model`."""

    resumable = True

    def __init__(
        self, config: DecoderConfig, info: ModelInfo, parameters: Parameters, rotations: Rotations, ops: Ops
    ) -> None:
        self.config = config
        self.info = info
        weight = parameters.norm.weight if isinstance(parameters.norm, LayerNorm) else parameters.norm
        self.dtype, self.device = weight.dtype, weight.device
        self.parameters = parameters
        self._rotations = rotations
        self._temperatures = (
            config.temperature.table(len(rotations.rope[0]), self.device) if config.temperature else None
        )
        self.ops = ops
        self._activated = activation_of(config, ops)
        self._mixers = Mixers(ops, StateLayout(config.states))
        self._groups, self._cached = layer_places(parameters, info)
        self._scale = config.factors.attention or config.head_dim**-0.5
        self._step = ops.record(
            decoder_form(config, parameters, rotations.rope, self._scale, self.logits), self._one_by_one
        )

    def divide(self, groups: LayerGroups) -> None:
        """Give groups of layers blocks of their own; before the layout of the pool is asked for."""
        self.info = replace(self.info, groups=groups)
        self._groups, self._cached = layer_places(self.parameters, self.info)

    def forward(
        self,
        token_ids: torch.Tensor,
        kv: torch.Tensor,
        plan: BatchPlan,
        keep_going: KeepGoing = always,
        halfway: SuspendedPass | None = None,
    ) -> torch.Tensor:
        plan = self._rotations.placed(plan)
        if self._step is not None and halfway is None and self._recorded(self._step, plan, kv):
            try:
                return self._step(token_ids, kv, plan, keep_going)
            except Halted as halted:
                x = self._normed(halted.residual, self.parameters.layers[halted.layer].input_norm)
                raise ForwardAbandoned(SuspendedPass(halted.layer, x, halted.residual)) from None
        return self._one_by_one(token_ids, kv, plan, keep_going, halfway)

    def _one_by_one(
        self,
        token_ids: torch.Tensor,
        kv: torch.Tensor,
        plan: BatchPlan,
        keep_going: KeepGoing = always,
        halfway: SuspendedPass | None = None,
    ) -> torch.Tensor:
        inputs = self._layer_inputs(token_ids)
        halfway = halfway or self._begun(token_ids, plan)
        return self._layers(halfway, len(self.parameters.layers), kv, plan, inputs, keep_going).x

    def _layers(
        self, begin: SuspendedPass, end: int, kv: torch.Tensor, plan: BatchPlan, inputs: Inputs, keep_going: KeepGoing
    ) -> SuspendedPass:
        """Return the pass before layer `end`, or with hidden states as x. Raises ForwardAbandoned."""
        x, residual = begin.x, begin.residual
        for index in range(begin.layer, end):
            if index > begin.layer and not keep_going():
                raise ForwardAbandoned(SuspendedPass(index, x, residual))
            x, residual = self._through(index, x, residual, kv, plan, inputs)
        return SuspendedPass(max(begin.layer, end), x, residual)

    def _layer_inputs(self, token_ids: torch.Tensor) -> Inputs:
        """Return the inputs that the layers read of the tokens beside the hidden states; None for most families."""
        return None

    def _begun(self, token_ids: torch.Tensor, plan: BatchPlan) -> SuspendedPass:
        """Return the pass before the first layer."""
        residual = embedded(self.parameters.embedding, token_ids, plan.media)
        return SuspendedPass(0, self._normed(residual, self.parameters.layers[0].input_norm), residual)

    def _through(
        self, index: int, x: torch.Tensor, residual: torch.Tensor, kv: torch.Tensor, plan: BatchPlan, inputs: Inputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next layer's x, or after the last one the hidden states, and residual. inputs: `_layer_inputs`."""
        x, residual, behind = self._layer(index, x, residual, kv, plan)
        if plan.media is not None:
            residual = plan.media.added(residual, index)
        return self._added(x, residual, behind, self._following(index))

    def _following(self, index: int) -> Norm | None:
        """Return the norm of the input of what follows a layer: another layer, or the head."""
        layers = self.parameters.layers
        return layers[index + 1].input_norm if index + 1 < len(layers) else self.parameters.norm

    def _layer(
        self, index: int, x: torch.Tensor, residual: torch.Tensor, kv: torch.Tensor, plan: BatchPlan
    ) -> tuple[torch.Tensor, torch.Tensor, Norm | None]:
        """Return the layer's last output, the residual to which it is added, and the norm that comes before that."""
        layer = self.parameters.layers[index]
        residual = x * layer.kept[0] if layer.kept else residual
        if not layer.mixes:
            return self._mlp(index, x, plan), residual, layer.behind_mlp
        mixed = self._mixed(index, x, kv, plan)
        if layer.mlp is None:
            return mixed, residual, layer.behind_attention
        if self.config.parallel:
            return mixed + self._mlp(index, x, plan), residual, layer.behind_mlp
        x, residual = self._added(mixed, residual, layer.behind_attention, layer.post_norm)
        residual = x * layer.kept[1] if layer.kept else residual
        return self._mlp(index, x, plan), residual, layer.behind_mlp

    def _mixed(self, index: int, x: torch.Tensor, kv: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """Return the sum of the layer's attention and recurrent mixer, whichever it has."""
        layer = self.parameters.layers[index]
        plan = plan.of_group(self._groups[index])
        if layer.mixer is None:
            return self._attention(index, x, self._view(kv, index, plan), plan)
        mixed = self._mixers(layer.mixer, x, plan, lambda linear, name, x: self._dense(linear, index, name, x, plan))
        if layer.attention is None:
            return mixed
        return mixed + self._attention(index, x, self._view(kv, index, plan), plan)

    def _view(self, kv: torch.Tensor, index: int, plan: BatchPlan) -> torch.Tensor:
        """Return the K/V that a layer reads, in the pool."""
        return layer_view(kv, self._cached[index], self.info.layers, plan.block_size)

    def _added(
        self, x: torch.Tensor, residual: torch.Tensor, behind: Norm | None, before: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the output of attention or MLP to the residual; return the next input and the new residual.

        behind: norm of that output. before: norm of the next input."""
        x = self._normed(x, behind)
        if isinstance(before, torch.Tensor):
            return self.ops.add_rms_norm(x, residual, before, self.config.norm_eps)
        residual = residual + x
        return self._normed(residual, before), residual

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits, cap = self.parameters.head(hidden, torch.float32), self.config.caps.logits
        return (logits / cap).tanh_().mul_(cap) if cap else logits

    def next_logits(self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan) -> NextLogits:
        plan = self._rotations.placed(plan)
        if self._step is not None and self._recorded(self._step, plan, kv):
            return self._step.logits(token_ids, kv, plan)
        return super().next_logits(token_ids, kv, plan)

    def _recorded(self, step: Step, plan: BatchPlan, kv: torch.Tensor) -> bool:
        """Return whether the recorded step computes the batch."""
        tempered = self.config.temperature is not None and max(plan.total_lens) > self.config.temperature.span
        return plan.media is None and not plan.adapted and not tempered and step.takes(plan, kv)

    def dense_layers(self) -> Iterator[Linear]:
        """Yield all dense layers, the vocabulary projection last."""
        for layer in self.parameters.layers:
            yield from layer.dense_layers()
        yield self.parameters.head

    def _dense(self, linear: Linear, index: int, name: str, x: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """Return the outputs of the dense layer `name` in layer `index`, plus the terms of the batch's adapters."""
        y = linear(x)
        for adapter, tokens in ((each.adapter, each.tokens) for each in plan.adapted):
            if parts := adapter.layers[index].get(name):
                self.ops.add_low_rank(y, x, tokens, parts)
        return y

    def _attention(self, index: int, x: torch.Tensor, kv_layer: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        config, ops, own = self.config, self.ops, self.parameters.layers[index].attention
        assert own is not None
        if isinstance(own, Latent):
            return latent_attention(own, x, kv_layer, plan, self.ops, self._rotations.rope, self._scale)
        sizes, gate = [config.q_size * (1 + own.gated), config.kv_size, config.kv_size], None
        qkv = self._dense(own.qkv, index, "qkv", x, plan)
        if bound := config.caps.qkv:
            qkv.clamp_(-bound, bound)
        q, k, v = torch.split(qkv, sizes, dim=1)
        if own.gated:
            q, gate = q.view(len(x), -1, 2, config.head_dim).unbind(2)
            q = q.flatten(1)
        if own.normed is not None:
            q, k = own.normed(q, k)
        elif config.family.wide_qk_norm:
            q, k = self._normed(q, own.q_norm), self._normed(k, own.k_norm)
        q, k, v = (part.view(len(x), -1, config.head_dim) for part in (q, k, v))
        if not config.family.wide_qk_norm:
            q, k = self._normed(q, own.q_norm), self._normed(k, own.k_norm)
        cos, sin = self._rotations.tables(plan, windowed=own.window != 0) if own.rotated else (None, None)
        q = ops.rope_and_cache(q, k, v, cos, sin, kv_layer, plan)
        if own.q_scale is not None:
            q = q * own.q_scale
        if own.tempered and self._temperatures is not None:
            q = (q * self._temperatures[plan.positions][:, None, None]).to(q.dtype)
        out = ops.paged_attention(q, kv_layer, plan, self._scale, own.window, config.caps.attention, own.sinks)
        out = out if gate is None else ops.sigmoid_mul(out, gate)
        return self._dense(own.o, index, "o", out.flatten(1), plan)

    def _mlp(self, index: int, x: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        mlp = self.parameters.layers[index].mlp
        assert mlp is not None
        if isinstance(mlp, Experts):
            return mixture(mlp, x, self._activated)
        if isinstance(mlp, Ungated):
            inner = self.ops.activate(self._dense(mlp.up, index, "up", x, plan), mlp.activation)
            return self._dense(mlp.down, index, "down", inner, plan)
        inner = self._activated(self._dense(mlp.gate_up, index, "gate_up", x, plan))
        return self._dense(mlp.down, index, "down", inner, plan)

    def _normed(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        if norm is None:
            return x
        if isinstance(norm, LayerNorm):
            return self.ops.layer_norm(x, norm, self.config.norm_eps)
        return self.ops.rms_norm(x, norm, self.config.norm_eps)

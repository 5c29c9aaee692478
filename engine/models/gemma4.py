"""Gemma 4's text decoder and its loader: inputs and a factor for each layer, and perhaps experts beside the MLP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

from kvferry.engine.models.experts_config import ExpertsConfig
from kvferry.engine.models.layer_inputs import InputGate, read_gate
from kvferry.engine.models.shaped_decoder import ShapedDecoder, ShapedLoader
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.decoder_spec import Experts, Gated, LayerForm
from kvferry.kernels.expert_routing import route
from kvferry.kernels.experts import mixed
from kvferry.kernels.linear import Linear


@dataclass(frozen=True, slots=True)
class ExpertsBeside:
    """Experts whose sum is added to the MLP's output.

    All read the residual before the MLP: the router its norm times `scale`, the experts their own norm. factors:
    float32 [experts], which multiply an expert's weight once it is chosen. before, behind, behind_mlp: norms [hidden]
    of the experts' input and output, and of the MLP's output."""

    experts: Experts
    scale: torch.Tensor
    factors: torch.Tensor
    before: torch.Tensor
    behind: torch.Tensor
    behind_mlp: torch.Tensor


@dataclass(frozen=True, slots=True)
class Gemma4Layer(LayerForm):
    """Layer of Gemma 4. factor: of its result, [1]. given: adds the layer's own input, or None. beside: experts."""

    factor: torch.Tensor | None = None
    given: InputGate | None = None
    beside: ExpertsBeside | None = None

    def dense_layers(self) -> Iterator[Linear]:
        """Yield the dense layers."""
        beside = self.beside.experts if self.beside is not None else None
        for part in (self.attention, self.mlp, self.given, beside):
            if part is not None:
                yield from part.dense_layers()


class Gemma4Decoder(ShapedDecoder):
    """Implements `engine.models.base.Model` for layers of `Gemma4Layer`."""

    def _through(
        self,
        index: int,
        x: torch.Tensor,
        residual: torch.Tensor,
        kv: torch.Tensor,
        plan: BatchPlan,
        inputs: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.parameters.layers[index]
        assert isinstance(layer, Gemma4Layer)
        attended = self._attention(index, x, self._view(kv, index, plan), plan)
        x, residual = self._added(attended, residual, layer.behind_attention, layer.post_norm)
        x = self._mlp(index, x, plan)
        if layer.beside is not None:
            x = self._normed(x, layer.beside.behind_mlp) + self._of_experts(layer.beside, residual)
        residual = residual + self._normed(x, layer.behind_mlp)
        if layer.given is not None and inputs is not None:
            residual = residual + layer.given(residual, inputs[:, index], self.ops, self._normed)
        if layer.factor is not None:
            residual = residual * layer.factor
        return self._normed(residual, self._following(index)), residual

    def _of_experts(self, own: ExpertsBeside, residual: torch.Tensor) -> torch.Tensor:
        logits = own.experts.router(self._normed(residual, own.scale), torch.float32)
        weights, chosen = route(logits, own.experts.routing)
        x = self._normed(residual, own.before)
        out = mixed(own.experts, x, weights * own.factors[chosen], chosen, self._activated)
        return self._normed(out, own.behind)


class Gemma4Loader(ShapedLoader):
    """Loader of its parameters. Raises ConfigError as its reader does."""

    def _layer(self, index: int) -> LayerForm:
        own, reader, prefix = super()._layer(index), self._reader, f"model.layers.{index}"
        experts = self._config.experts
        return Gemma4Layer(
            **{field.name: getattr(own, field.name) for field in fields(LayerForm)},
            factor=reader.parameter(f"{prefix}.layer_scalar", 1),
            given=read_gate(reader, self.shapes, prefix),
            beside=self._beside(prefix, experts) if experts is not None else None,
        )

    def _beside(self, prefix: str, config: ExpertsConfig) -> ExpertsBeside:
        reader, hidden, count = self._reader, self._config.hidden_size, config.count
        gate_up = reader.stacked(f"{prefix}.experts.gate_up_proj", count, 2 * config.size, hidden)
        down = reader.stacked(f"{prefix}.experts.down_proj", count, hidden, config.size)
        each = tuple(Gated(*pair) for pair in zip(gate_up, down, strict=True))
        grouped = reader.ops.grouped(each)
        router = reader.stack([(f"{prefix}.router.proj.weight", count)], hidden)
        return ExpertsBeside(
            experts=Experts(
                router=reader.ops.linear(router),
                each=each if grouped is None else grouped.each,
                grouped=grouped,
                routing=config.routing,
            ),
            scale=reader.parameter(f"{prefix}.router.scale", hidden) * hidden**-0.5,
            factors=reader.float32(f"{prefix}.router.per_expert_scale", count),
            before=reader.rms_norm(f"{prefix}.pre_feedforward_layernorm_2", hidden),
            behind=reader.rms_norm(f"{prefix}.post_feedforward_layernorm_2", hidden),
            behind_mlp=reader.rms_norm(f"{prefix}.post_feedforward_layernorm_1", hidden),
        )

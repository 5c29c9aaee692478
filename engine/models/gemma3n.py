"""Gemma 3n's text decoder and its loader: AltUp streams of hidden states, a learned residual (Laurel), sparse MLPs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from statistics import NormalDist

import torch

from kvferry.engine.models.altup import AltUp, Streams, read_altup, read_streams
from kvferry.engine.models.altup_config import AltUpConfig
from kvferry.engine.models.base import SuspendedPass
from kvferry.engine.models.layer_inputs import InputGate, read_gate
from kvferry.engine.models.media_inputs import embedded
from kvferry.engine.models.shaped_decoder import ShapedDecoder, ShapedLoader, ShapedParameters
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.decoder_spec import Gated, LayerForm
from kvferry.kernels.linear import Linear


@dataclass(frozen=True, slots=True)
class Laurel:
    """Learned residual of low rank beside attention. norm: of its output, [hidden]."""

    left: Linear
    right: Linear
    norm: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3nLayer(LayerForm):
    """Layer of Gemma 3n. given: adds the layer's own input to all streams but the first, or None.

    cutoff: standard deviations above their mean below which the MLP's gates are zeroed, or None."""

    altup: AltUp
    laurel: Laurel
    given: InputGate | None
    cutoff: float | None

    def dense_layers(self) -> Iterator[Linear]:
        """Yield the dense layers."""
        yield from (self.laurel.left, self.laurel.right)
        for part in (self.attention, self.mlp, self.given):
            if part is not None:
                yield from part.dense_layers()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3nParameters(ShapedParameters):
    """Parameters of the decoder."""

    streams: Streams


class Gemma3nDecoder(ShapedDecoder):
    """Implements `engine.models.base.Model` for layers of `Gemma3nLayer`. Between layers x is the residual itself."""

    parameters: Gemma3nParameters

    def dense_layers(self) -> Iterator[Linear]:
        yield from self.parameters.streams.dense_layers()
        yield from super().dense_layers()

    def _begun(self, token_ids: torch.Tensor, plan: BatchPlan) -> SuspendedPass:
        streams = self.parameters.streams.spread(embedded(self.parameters.embedding, token_ids, plan.media))
        return SuspendedPass(0, streams, streams)

    def _through(
        self,
        index: int,
        x: torch.Tensor,
        residual: torch.Tensor,
        kv: torch.Tensor,
        plan: BatchPlan,
        inputs: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer, normed = self.parameters.layers[index], self._normed
        assert isinstance(layer, Gemma3nLayer)
        predicted = layer.altup.predict(residual, normed)
        active = predicted[:, layer.altup.active]
        x = normed(active, layer.input_norm)
        learned = x + normed(layer.laurel.right(layer.laurel.left(x)), layer.laurel.norm)
        attended = active + normed(self._attention(index, x, self._view(kv, index, plan), plan), layer.behind_attention)
        attended = (attended + learned) * math.sqrt(0.5)
        x = self._mlp(index, normed(attended, layer.post_norm), plan)
        streams = layer.altup.correct(predicted, attended + normed(x, layer.behind_mlp), normed)
        if layer.given is not None and inputs is not None:
            added = layer.given(layer.altup.opening(streams), inputs[:, index], self.ops, normed)
            streams[:, 1:] += added[:, None]
        if index + 1 < len(self.parameters.layers):
            return streams, streams
        return normed(self.parameters.streams.joined(streams), self.parameters.norm), streams

    def _mlp(self, index: int, x: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        layer = self.parameters.layers[index]
        assert isinstance(layer, Gemma3nLayer)
        assert isinstance(layer.mlp, Gated)
        if layer.cutoff is None:
            return super()._mlp(index, x, plan)
        gate_up = self._dense(layer.mlp.gate_up, index, "gate_up", x, plan)
        gate = gate_up[:, : gate_up.shape[1] // 2]
        spread, mean = torch.std_mean(gate.float(), -1, unbiased=False, keepdim=True)
        gate.copy_((gate - (mean + spread * layer.cutoff)).relu_())
        return self._dense(layer.mlp.down, index, "down", self._activated(gate_up), plan)


class Gemma3nLoader(ShapedLoader):
    """Loader of its parameters. Raises ConfigError as its reader does."""

    @property
    def _altup(self) -> AltUpConfig:
        assert self._config.altup is not None
        return self._config.altup

    def load(self) -> Gemma3nParameters:
        own = super().load()
        streams = read_streams(self._reader, self._altup)
        return Gemma3nParameters(
            **{field.name: getattr(own, field.name) for field in fields(ShapedParameters)}, streams=streams
        )

    def _layer(self, index: int) -> LayerForm:
        own, reader, prefix = super()._layer(index), self._reader, f"model.layers.{index}"
        hidden, rank, share = self._config.hidden_size, self._altup.rank, self._altup.sparsity[index]
        laurel = Laurel(
            left=reader.dense(f"{prefix}.laurel", [("linear_left", rank)], hidden, False),
            right=reader.dense(f"{prefix}.laurel", [("linear_right", hidden)], rank, False),
            norm=reader.rms_norm(f"{prefix}.laurel.post_laurel_norm", hidden),
        )
        return Gemma3nLayer(
            **{field.name: getattr(own, field.name) for field in fields(LayerForm)},
            altup=read_altup(reader, self._altup, f"{prefix}.altup"),
            laurel=laurel,
            given=read_gate(reader, self.shapes, prefix),
            cutoff=NormalDist().inv_cdf(share) if share else None,
        )

"""Alternating updates (AltUp, Baykal et al. 2023) of Gemma 3n: several hidden-state streams; each layer computes one.

Before a layer all streams are predicted from those of the layer before; after it they are corrected by the layer's
output for the active one. All streams are [T, streams, hidden]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvferry.engine.models.altup_config import AltUpConfig
from kvferry.engine.models.layer_inputs import Normed
from kvferry.engine.models.reader import TensorReader
from kvferry.kernels.linear import Linear

_TINY = 1e-5
"""Smallest mean square of a stream that is scaled to another's magnitude."""


@dataclass(frozen=True, slots=True)
class AltUp:
    """Prediction and correction of one layer.

    norm: [hidden], of the router [streams, hidden], whose tanh weighs the maps: prediction [streams^2, streams] and
    correction [streams, streams]. scale: [hidden], or None."""

    active: int
    norm: torch.Tensor
    router: torch.Tensor
    prediction: torch.Tensor
    correction: torch.Tensor
    scale: torch.Tensor | None

    def predict(self, streams: torch.Tensor, normed: Normed) -> torch.Tensor:
        """Return the streams as predicted from those before the layer."""
        count = streams.shape[1]
        maps = F.linear(self._weighed(streams[:, self.active], normed), self.prediction).view(-1, count, count)
        return torch.baddbmm(streams, maps, streams)

    def correct(self, predicted: torch.Tensor, made: torch.Tensor, normed: Normed) -> torch.Tensor:
        """Return the streams after the layer made `made` [T, hidden] of the active one."""
        shares = F.linear(self._weighed(made, normed), self.correction) + 1.0
        return torch.addcmul(predicted, shares[:, :, None], (made - predicted[:, self.active])[:, None])

    def opening(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the input of the gate for the layer's own input, [T, hidden]."""
        own = streams[:, self.active]
        return own if self.scale is None else own * self.scale

    def _weighed(self, x: torch.Tensor, normed: Normed) -> torch.Tensor:
        routed = F.linear(normed(x, self.norm) / x.shape[1], self.router)
        return torch.tanh(routed.float()).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Streams:
    """Ways from embeddings to streams, and from the last layer's streams to one: dense layers for all but the first."""

    into: tuple[Linear, ...]
    out_of: tuple[Linear, ...]

    def spread(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return streams of embeddings [T, hidden], all of the same magnitude."""
        others = [_scaled(linear(embedded), embedded) for linear in self.into]
        return torch.stack((embedded, *others), 1)

    def joined(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the mean [T, hidden] of the streams, brought to the magnitude of the first."""
        first, *rest = streams.unbind(1)
        others = [_scaled(linear(stream), first) for linear, stream in zip(self.out_of, rest, strict=True)]
        return torch.stack((first, *others), 1).mean(1)

    def dense_layers(self) -> Iterator[Linear]:
        """Yield the dense layers."""
        yield from (*self.into, *self.out_of)


def _scaled(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return x [T, hidden] with the root mean square of target."""
    target_power, own = (each.float().square().mean(-1, keepdim=True) for each in (target, x))
    return (x.float() * (target_power.sqrt() / own.clamp(min=_TINY).sqrt())).to(x.dtype)


def read_altup(reader: TensorReader, config: AltUpConfig, prefix: str) -> AltUp:
    """Read a layer's part, whose tensors have this prefix. Raises ConfigError as its reader does."""
    hidden, count = reader.config.hidden_size, config.streams
    return AltUp(
        active=config.active,
        norm=reader.rms_norm(f"{prefix}.router_norm", hidden),
        router=reader.parameter(f"{prefix}.modality_router.weight", count, hidden),
        prediction=reader.parameter(f"{prefix}.prediction_coefs.weight", count * count, count),
        correction=reader.parameter(f"{prefix}.correction_coefs.weight", count, count),
        scale=reader.parameter(f"{prefix}.correct_output_scale", hidden) if config.scaled else None,
    )


def read_streams(reader: TensorReader, config: AltUpConfig) -> Streams:
    """Read the model's projections into and out of streams. Raises ConfigError as its reader does."""
    hidden = reader.config.hidden_size
    into, out_of = (
        tuple(reader.linear([(f"model.{name}.{i}.weight", hidden)], hidden) for i in range(config.streams - 1))
        for name in ("altup_projections", "altup_unembed_projections")
    )
    return Streams(into, out_of)

"""StepLayers: adds a decoder's layers to the C++ extension's step, unless it cannot replay one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvferry.kernels.activation import KINDS
from kvferry.kernels.cpu.packed_layers import PackedLinear
from kvferry.kernels.decoder_spec import Gated, Gqa, LayerForm, Mixer, Ungated
from kvferry.kernels.layer_norm import LayerNorm
from kvferry.kernels.linear import Linear, Scaled
from kvferry.kernels.mixer_spec import GatedDelta, ShortConv, StateSpace
from kvferry.kernels.sequence_state import StateLayout

if TYPE_CHECKING:
    from kvferry.kernels.cpu._native import Mixer as NativeMixer
    from kvferry.kernels.cpu._native import Step

_UNIT = 32
_MAX_CONV_WIDTH = 8
"""Widest convolution that is compiled, in tokens."""


class StepLayers:
    """Adds layers to a step of the extension. mixer: the extension's class. states: layout of the model's states."""

    def __init__(self, step: Step, mixer: type[NativeMixer], states: StateLayout) -> None:
        self._step, self._mixer, self._states = step, mixer, states

    def add(self, layer: LayerForm, gated: bool) -> bool:
        """Add the layer; return False for one that the extension does not replay. gated: of all layers' attention."""
        mlp, before, after = layer.mlp, layer.input_norm, layer.post_norm
        if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
            return False
        if not isinstance(mlp, Gated | Ungated) or (parts := _packed(*mlp.dense_layers())) is None:
            return False
        gate_up, down = parts
        if down.layer.in_features % _UNIT or (layer.attention is None) == (layer.mixer is None):
            return False
        rest = gate_up.layer.weights, down.layer.weights, _activation(mlp)
        if layer.mixer is not None:
            found = self._mixer_of(layer.mixer)
            if found is not None:
                mixer, factor = found
                self._step.add_mixer(before, after, mixer, *rest, (factor, down.factor))
            return found is not None
        own = layer.attention
        if not isinstance(own, Gqa) or own.gated != gated or own.q_scale is not None:
            return False
        dense, q_norm, k_norm = _packed(own.qkv, own.o), own.q_norm, own.k_norm
        if dense is None or isinstance(q_norm, LayerNorm) or isinstance(k_norm, LayerNorm):
            return False
        qkv, o = dense
        self._step.add_layer(
            before,
            q_norm,
            k_norm,
            after,
            qkv.layer.weights,
            o.layer.weights,
            *rest[:2],
            own.rotated,
            own.window,
            rest[2],
            (o.factor, down.factor),
        )
        return True

    def _mixer_of(self, own: Mixer) -> tuple[NativeMixer, float] | None:
        """Return the mixer and the factor of its results; None for one that the extension does not replay."""
        if isinstance(own, ShortConv):
            return self._short_conv(own)
        if isinstance(own, GatedDelta):
            return self._delta(own)
        return self._scan(own) if isinstance(own, StateSpace) else None

    def _short_conv(self, own: ShortConv) -> tuple[NativeMixer, float] | None:
        dense = _packed(own.inputs, own.out)
        if dense is None or own.conv.shape[1] > _MAX_CONV_WIDTH:
            return None
        inputs, out = (each.layer.weights for each in dense)
        made = self._mixer.short_conv(inputs, own.conv, own.conv_bias, out, self._states.begin(own.part))
        return made, dense[-1].factor

    def _delta(self, own: GatedDelta) -> tuple[NativeMixer, float] | None:
        dense = _packed(own.inputs, own.rates, own.out)
        turns = own.tiled and own.k_heads < own.v_heads
        if dense is None or turns or own.conv.shape[1] > _MAX_CONV_WIDTH:
            return None
        inputs, rates, out = (each.layer.weights for each in dense)
        sizes = own.k_heads, own.v_heads, own.k_dim, own.v_dim, own.eps, self._states.begin(own.part)
        made = self._mixer.delta(inputs, rates, own.conv, own.decay, own.dt_bias, own.norm, out, *sizes)
        return made, dense[-1].factor

    def _scan(self, own: StateSpace) -> tuple[NativeMixer, float] | None:
        dense = _packed(own.inputs, own.out)
        if dense is None or own.norm is None or own.conv.shape[1] > _MAX_CONV_WIDTH:
            return None
        inputs, out = (each.layer.weights for each in dense)
        made = self._mixer.scan(
            inputs,
            own.conv,
            own.conv_bias,
            own.decay,
            own.skip,
            own.dt_bias,
            own.norm,
            out,
            own.heads,
            own.dim,
            own.groups,
            own.state,
            own.norm_first,
            *own.limits,
            own.eps,
            self._states.begin(own.part),
        )
        return made, dense[-1].factor


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Packed dense layer and the factor that multiplies its results."""

    layer: PackedLinear
    factor: float


def packed_part(layer: Linear) -> PackedPart | None:
    """Return the layer if the extension packed it, with its factor."""
    own, factor = (layer.own, layer.factor) if isinstance(layer, Scaled) else (layer, 1.0)
    return PackedPart(own, factor) if isinstance(own, PackedLinear) else None


def _packed(*layers: Linear) -> list[PackedPart] | None:
    """Return the layers if the extension packed all of them, and only the last one has a factor."""
    found = [part for part in map(packed_part, layers) if part is not None]
    return found if len(found) == len(layers) and all(part.factor == 1.0 for part in found[:-1]) else None


def _activation(mlp: Gated | Ungated) -> tuple[int, float, float, float, float]:
    if not isinstance(mlp, Ungated):
        return (-1, 0.0, 0.0, 0.0, 0.0)
    own = mlp.activation
    return (KINDS.index(own.kind), own.positive, own.negative, own.beta, own.bound)

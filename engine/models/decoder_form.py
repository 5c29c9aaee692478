"""DecoderForm of a decoder, for backends that replay whole steps; places of its layers in KV blocks; its activation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch

from kvferry.engine.models.base import ModelInfo
from kvferry.engine.models.config import DecoderConfig
from kvferry.engine.models.parameters import Parameters
from kvferry.kernels.activation import Activation
from kvferry.kernels.decoder_spec import DecoderForm
from kvferry.kernels.ops import Ops
from kvferry.kernels.sequence_state import StateLayout


def decoder_form(
    config: DecoderConfig,
    parameters: Parameters,
    rope: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    logits: Callable[[torch.Tensor], torch.Tensor],
) -> DecoderForm:
    """Return the form. rope: cos and sin. scale: of attention. logits: see `DecoderForm`."""
    return DecoderForm(
        embedding=parameters.embedding,
        layers=parameters.layers,
        norm=parameters.norm,
        head=parameters.head,
        cos=rope[0],
        sin=rope[1],
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        eps=config.norm_eps,
        scale=scale,
        logits=logits,
        plain=config.plain,
        states=StateLayout(config.states),
    )


def layer_places(parameters: Parameters, info: ModelInfo) -> tuple[list[int | None], list[int]]:
    """Return each layer's group (`BatchPlan.of_group`) and its place in a block; any for a layer without attention."""
    cached = [count - 1 for count in accumulate(layer.attention is not None for layer in parameters.layers)]
    if info.groups is None:
        return [None] * len(cached), cached
    places = info.groups.places()
    return [places[index][0] for index in cached], [places[index][1] for index in cached]


def activation_of(config: DecoderConfig, ops: Ops) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the activation of its MLPs: of gate and up, or of up alone."""
    if config.activation is None:
        return partial(ops.gate_mul, gate=config.gate)
    return partial(ops.activate, activation=Activation(config.activation))

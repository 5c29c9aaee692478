"""Decides which models keep the K/V of sliding-window layers in KV blocks of their own (LayerGroups)."""

from __future__ import annotations

from kvferry.engine.models.base import Model
from kvferry.engine.models.config import DecoderConfig
from kvferry.engine.models.decoder import Decoder
from kvferry.protocol.layer_groups import LayerGroups

PADDING = 1.25
"""Limit of the layers that groups of window layers have room for, as a multiple of the window layers."""


def groups_of(config: DecoderConfig) -> LayerGroups | None:
    """Return the groups of a decoder's layers by how long their K/V live; None: a block has all layers.

    Groups need layers of both kinds: the blocks of layers that attend to all tokens form a sequence's chain, and layers
    with windows must nearly fill blocks of that size. A block also has all layers if the CPU extension replays the
    family's whole step, since it knows one table (`Family.plain`); if layers differ in shape or share K/V; if the cache
    holds latents; and beside recurrent layers."""
    if config.plain or config.shapes is not None or config.latent is not None or config.hybrid is not None:
        return None
    full = config.windows.count(0)
    windowed, groups = len(config.windows) - full, LayerGroups(config.windows)
    return groups if full and 0 < groups.count * full <= PADDING * windowed else None


def divide_layers(model: Model) -> None:
    """Give a model's layers with windows blocks of their own, where `groups_of` says so.

    Transformers' models, ranks and draft models keep all layers in one block."""
    if isinstance(model, Decoder) and (groups := groups_of(model.config)) is not None:
        model.divide(groups)

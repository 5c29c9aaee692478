"""Choice of the models whose layers with windows have KV blocks of their own."""

from __future__ import annotations

from kvferry.engine.models.base import Model
from kvferry.engine.models.config import DecoderConfig
from kvferry.engine.models.decoder import Decoder
from kvferry.protocol.layer_groups import LayerGroups

PADDING = 1.25
"""Most layers that the groups of layers with windows have room for, as a multiple of these layers."""


def groups_of(config: DecoderConfig) -> LayerGroups | None:
    """Return the groups of a decoder's layers by how long their K/V live; None: a block has all layers.

    They need layers of both kinds: those that attend to all tokens name the blocks of a sequence's chain, and those
    with windows must nearly fill blocks of that size. A block has all layers, too, of families whose whole step the CPU
    extension replays, since that knows one table (`Family.plain`), of layers that differ in shape or share K/V, of
    latents and beside recurrent layers."""
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

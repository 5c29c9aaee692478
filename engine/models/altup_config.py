"""AltUpConfig: settings of Gemma 3n's AltUp streams, learned residual and sparse MLPs, parsed from a config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvferry.model_files.config_fields import whole_or
from kvferry.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AltUpConfig:
    """Settings of Gemma 3n's layers.

    streams: their number; active: the one that layers compute. scaled: its part that opens the gate of a layer's input
    is multiplied by weights. rank: of the learned residual (Laurel). sparsity: for each layer the share of an MLP's
    inner values that are zeroed, 0 for none."""

    streams: int
    active: int
    scaled: bool
    rank: int
    sparsity: tuple[float, ...]


def parse_altup(config: dict[str, Any], layers: int) -> AltUpConfig:
    """Return the settings of a config.json. Raises ConfigError."""
    sparsity = config.get("activation_sparsity_pattern")
    if sparsity is None:
        sparsity = [0.95] * 10 + [0.0] * (layers - 10) if layers > 10 else [0.0] * layers
    shares = sparsity if isinstance(sparsity, list) else []
    if len(shares) != layers or not all(isinstance(share, int | float) and 0 <= share < 1 for share in shares):
        raise ConfigError(
            f"config.json: activation_sparsity_pattern must be {layers} numbers from 0 to below 1", param="model"
        )
    streams, active = whole_or(config, "altup_num_inputs", 4), config.get("altup_active_idx") or 0
    if not isinstance(active, int) or not 0 <= active < streams:
        raise ConfigError(f"config.json: altup_active_idx is {active!r:.40}, of {streams} streams", param="model")
    return AltUpConfig(
        streams=streams,
        active=active,
        scaled=bool(config.get("altup_correct_scale", True)),
        rank=whole_or(config, "laurel_rank", 64),
        sparsity=tuple(float(share) for share in shares),
    )

"""Sliding-window and rotary settings per layer, from a config.json."""

from __future__ import annotations

from typing import Any

from kvferry.engine.models.families import Family
from kvferry.engine.models.rope_config import SLIDING


def rotations_and_windows(
    config: dict[str, Any], layers: int, family: Family
) -> tuple[tuple[bool, ...], tuple[int, ...]]:
    """Return for each layer whether it rotates, and the positions of its window, 0 for all."""
    rotated = _rotated_layers(config, layers)
    windows = _windows(config, rotated, family)
    return (tuple(window > 0 for window in windows) if family.windows_rotate else rotated), windows


def _rotated_layers(config: dict[str, Any], layers: int) -> tuple[bool, ...]:
    if config["model_type"] != "smollm3":
        return (True,) * layers
    interval = config.get("no_rope_layer_interval", 4)
    marks = config.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(layers)]
    return tuple(bool(mark) for mark in marks[:layers])


def _windows(config: dict[str, Any], rotated: tuple[bool, ...], family: Family) -> tuple[int, ...]:
    window, kind = config.get("sliding_window") or 0, config["model_type"]
    full = (0,) * len(rotated)
    if kind == "llama" or not window:
        return full
    if family.windowed:
        return (window,) * len(rotated) if config.get("use_sliding_window", True) else full
    if not family.pattern and not config.get("use_sliding_window", False):
        return full
    types = config.get("layer_types")
    if types:
        sliding = [layer == SLIDING for layer in types]
    elif family.pattern:
        pattern = config.get("sliding_window_pattern") or family.pattern
        sliding = [(i + 1) % pattern != 0 for i in range(len(rotated))]
    elif kind == "smollm3":
        sliding = [not turns for turns in rotated]
    else:
        sliding = [i >= config.get("max_window_layers", 28) for i in range(len(rotated))]
    return tuple(window if slides else 0 for slides in sliding)

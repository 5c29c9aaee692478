"""Reads from a config.json, for each layer, its sliding window (or chunk) and whether it rotates."""

from __future__ import annotations

from typing import Any

from kvferry.engine.models.family import Family
from kvferry.engine.models.rope_config import SLIDING
from kvferry.model_files.config_fields import whole_or
from kvferry.protocol.errors import ConfigError


def rotations_and_windows(
    config: dict[str, Any], layers: int, family: Family
) -> tuple[tuple[bool, ...], tuple[int, ...]]:
    """Return for each layer whether it rotates, and its window: see `protocol.attention_window`. Raises ConfigError."""
    rotated = _rotated_layers(config, layers, family)
    if family.unrotated and config.get("position_embedding_type") != "rope":
        rotated = (False,) * layers
    windows = _chunks(config, rotated) if family.chunked else _windows(config, rotated, family)
    if family.windows_rotate and (config.get("sliding_window") or not family.else_all_rotate):
        rotated = tuple(window > 0 for window in windows)
    return rotated, windows


def _rotated_layers(config: dict[str, Any], layers: int, family: Family) -> tuple[bool, ...]:
    if config["model_type"] != "smollm3" and not family.chunked:
        return (True,) * layers
    interval = whole_or(config, "no_rope_layer_interval", 4)
    marks = config.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(layers)]
    if len(marks) < layers:
        raise ConfigError(f"config.json: no_rope_layers has {len(marks)} marks for {layers} layers", param="model")
    return tuple(bool(mark) for mark in marks[:layers])


def _chunks(config: dict[str, Any], rotated: tuple[bool, ...]) -> tuple[int, ...]:
    """Return the windows of layers that attend in chunks, which begin at multiples (`protocol.attention_window`)."""
    chunk, types = whole_or(config, "attention_chunk_size", 0), config.get("layer_types")
    if not types:
        return tuple(-chunk if turns else 0 for turns in rotated)
    if len(types) != len(rotated):
        raise ConfigError(f"config.json: layer_types has {len(types)} of {len(rotated)} layers", param="model")
    return tuple(-chunk if kind == "chunked_attention" else 0 for kind in types)


def _windows(config: dict[str, Any], rotated: tuple[bool, ...], family: Family) -> tuple[int, ...]:
    window, kind = config.get("sliding_window") or 0, config["model_type"]
    full = (0,) * len(rotated)
    if kind == "llama" or not window:
        return full
    types = config.get("layer_types")
    if family.windowed and not (family.layered and types):
        return (window,) * len(rotated) if config.get("use_sliding_window", True) else full
    if not family.pattern and not family.layered and not config.get("use_sliding_window", False):
        return full
    if types:
        if not isinstance(types, list):
            raise ConfigError(f"config.json: layer_types must be a list, got {types!r:.80}", param="model")
        if len(types) < len(rotated):
            raise ConfigError(
                f"config.json: layer_types has {len(types)} entries for {len(rotated)} layers", param="model"
            )
        sliding = [layer == SLIDING for layer in types[: len(rotated)]]
    elif family.pattern:
        sliding = _patterned(config.get("sliding_window_pattern") or family.pattern, len(rotated))
    elif kind == "smollm3":
        sliding = [not turns for turns in rotated]
    else:
        sliding = [i >= config.get("max_window_layers", 28) for i in range(len(rotated))]
    return tuple(window if slides else 0 for slides in sliding)


def _patterned(pattern: int | str, layers: int) -> list[bool]:
    """Return which layers have a window: all but each n-th, or the letters L of a text repeated, never the last."""
    if not pattern or not (isinstance(pattern, int) or set(pattern) <= set("LG")):
        raise ConfigError(
            f"config.json: sliding_window_pattern must be a positive number or letters L and G, got {pattern!r:.80}",
            param="model",
        )
    if isinstance(pattern, str):
        return [pattern[i % len(pattern)] == "L" and i + 1 < layers for i in range(layers)]
    return [(i + 1) % pattern != 0 for i in range(layers)]

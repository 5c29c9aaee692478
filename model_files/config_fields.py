"""Reads numbers from a config.json and checks their type and range."""

from __future__ import annotations

import math
from typing import Any

from kvferry.protocol.errors import ConfigError

MAX_LAYERS = 1 << 12
"""Maximum number of layers: thirty times that of the largest model known. Each takes memory before its weights do."""
LAYER_FIELDS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
"""Names of the number of layers in a config.json."""


def whole(config: dict[str, Any], name: str) -> int:
    """Return a field that must be a positive whole number. Raises ConfigError, or KeyError without it."""
    value = config[name]
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {name} must be a whole number of at least 1, got {value!r:.80}", param="model")
    return value


def whole_or(config: dict[str, Any], name: str, otherwise: int) -> int:
    """Return a field that must be a positive whole number; `otherwise` if it is missing, null or 0.

    Python multiplies texts and lists by numbers, too, and takes their memory. Raises ConfigError."""
    return whole(config, name) if config.get(name) else otherwise


def number_or(config: dict[str, Any], name: str, otherwise: float) -> float:
    """Return a field that must be a finite number of at least 0; `otherwise` if it is missing or null.

    Raises ConfigError."""
    value = config.get(name)
    if value is None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"config.json: {name} must be a number of at least 0, got {value!r:.80}", param="model")
    return float(value)


def check_layers(value: Any) -> None:
    """Raise ConfigError if this is a number of layers that no model has."""
    if isinstance(value, int) and value > MAX_LAYERS:
        raise ConfigError(f"a model of {value} layers is not supported, the limit is {MAX_LAYERS}", param="model")

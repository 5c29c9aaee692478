"""Validated fields of a config.json."""

from __future__ import annotations

from typing import Any

from kvferry.protocol.errors import ConfigError


def whole(config: dict[str, Any], name: str) -> int:
    """Return a field that must be a positive whole number. Raises ConfigError, or KeyError without it."""
    value = config[name]
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {name} must be a whole number of at least 1, got {value!r}", param="model")
    return value

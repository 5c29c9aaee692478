"""`check_known`: raises ConfigError unless an option's value is one of the known names."""

from __future__ import annotations

from collections.abc import Collection

from kvferry.protocol.errors import ConfigError


def check_known(param: str, name: str, known: Collection[str]) -> None:
    """Raise ConfigError for the setting `param` unless `name` is one of the known names."""
    if name not in known:
        raise ConfigError(f"{param} must be one of {', '.join(known)}, not {name!r}", param=param)

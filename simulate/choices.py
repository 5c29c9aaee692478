"""Named choices of policies, workloads and models."""

from __future__ import annotations

from collections.abc import Collection

from kvferry.protocol.errors import ConfigError


def check_known(param: str, name: str, known: Collection[str]) -> None:
    """Raises ConfigError, of the setting that is called so."""
    if name not in known:
        raise ConfigError(f"{param} must be one of {', '.join(known)}, not {name!r}", param=param)

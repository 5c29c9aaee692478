"""Conversion of any exception from reading a model's files into a ConfigError that names the model (`naming`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.protocol.errors import ConfigError, reason

MAX_REFUSAL = 800
"""Maximum length of an error about a model's files, in characters: they may quote a field as long as the file."""


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Turn any exception from reading the model's files into a ConfigError that names the model, in a short line.

    Files can be damaged in more ways than their readers expect."""
    try:
        yield
    except ConfigError as error:
        message = error.message if name in error.message else f"{name}: {error.message}"
        if len(message) > MAX_REFUSAL:
            message = message[: MAX_REFUSAL - 1] + "…"
        if error.param not in ("model", "chat_template") or message == error.message:
            raise
        raise ConfigError(message, param=error.param) from error
    except MemoryError as error:
        raise ConfigError(f"{name}: the model does not fit in memory", param="model") from error
    except Exception as error:
        raise ConfigError(f"{name} cannot be read: {reason(error)}", param="model") from error

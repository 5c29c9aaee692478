"""Key of an engine's API, from the environment or from a file that may change while the adapter runs."""

from __future__ import annotations

import logging
from pathlib import Path

from kvferry.protocol.errors import ConfigError
from kvferry.protocol.node_settings import EngineSettings

log = logging.getLogger("kvferry.adapter")


class ApiKey:
    """Key that is read when called; empty if the engine needs none.

    A file is read again when it changes; while it cannot be read, the last key is used. Raises ConfigError, whose
    message holds no key."""

    def __init__(self, settings: EngineSettings) -> None:
        self._file = Path(settings.engine_api_key_file) if settings.engine_api_key_file else None
        if self._file is not None and settings.engine_api_key:
            raise ConfigError("give the engine's API key either directly or by a file", param="engine_api_key_file")
        self._seen: tuple[int, int, int] | None = None
        self._key = _checked(settings.engine_api_key)
        if self._file is not None:
            try:
                self._read(self._file)
            except OSError as error:
                raise ConfigError(f"cannot read {self._file}: {error.strerror}", param="engine_api_key_file") from error

    def __call__(self) -> str:
        """Return the key that is valid now."""
        if self._file is not None:
            try:
                self._read(self._file)
            except (ConfigError, OSError) as error:
                log.warning("keeping the engine's previous API key: %s", error)
        return self._key

    def _read(self, file: Path) -> None:
        state = file.stat()
        seen = (state.st_mtime_ns, state.st_size, state.st_ino)
        if seen == self._seen:
            return
        text = file.read_text(encoding="utf-8", errors="replace").strip()
        if not text:
            raise ConfigError(f"{file} holds no key", param="engine_api_key_file")
        self._key, self._seen = _checked(text), seen


def _checked(key: str) -> str:
    """Return a key that fits into a header. Raises ConfigError."""
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("the engine's API key must be one line of ASCII characters", param="engine_api_key")
    return key

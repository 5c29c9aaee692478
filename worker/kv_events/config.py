"""Parser of --kv-events-config, the configuration of KV events in vLLM's JSON."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, fields
from typing import Any

from kvferry.protocol.errors import ConfigError

PARAM = "kv_events_config"
MAX_STEPS = 10**6


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """Configuration of the publisher of KV events.

    endpoint         ZeroMQ address of the publisher; bound if it has a `*` or `::` or is ipc or inproc, else connected
    replay_endpoint  ZeroMQ address at which readers request batches that they missed; None: no replay
    buffer_steps     number of batches kept for replay
    topic            first frame of each message"""

    enable_kv_cache_events: bool = True
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    topic: str = ""


def read_kv_events_config(text: str) -> KvEventsConfig | None:
    """Return the configuration; None if it turns events off. Raises ConfigError, also when pyzmq is missing."""
    if not text:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--kv-events-config is not valid JSON: {error}", param=PARAM) from None
    if not isinstance(value, dict):
        raise ConfigError("--kv-events-config must be a JSON object", param=PARAM)
    known = {field.name for field in fields(KvEventsConfig)}
    if unknown := [name for name in value if name not in known]:
        raise ConfigError(
            f"--kv-events-config has no field {unknown[0]!r}; it has {', '.join(sorted(known))}", param=PARAM
        )
    config = KvEventsConfig(**{name: each for name, each in value.items() if each is not None})
    _check(config)
    if not config.enable_kv_cache_events or config.publisher == "null":
        return None
    if importlib.util.find_spec("zmq") is None:
        raise ConfigError("--kv-events-config needs pyzmq: pip install 'kvferry[adapter]'", param=PARAM)
    return config


def _check(config: KvEventsConfig) -> None:
    def require(name: str, right: bool, what: str) -> None:
        if not right:
            got: Any = getattr(config, name)
            raise ConfigError(f"--kv-events-config: {name} must be {what}, got {got!r}", param=PARAM)

    replay, steps = config.replay_endpoint, config.buffer_steps
    require("enable_kv_cache_events", isinstance(config.enable_kv_cache_events, bool), "true or false")
    require("publisher", config.publisher in ("zmq", "null"), "zmq or null")
    require("endpoint", _is_address(config.endpoint), "a ZeroMQ address such as tcp://*:5557")
    require("replay_endpoint", replay is None or _is_address(replay), "a ZeroMQ address such as tcp://127.0.0.1:5558")
    require("buffer_steps", type(steps) is int and 1 <= steps <= MAX_STEPS, f"a number from 1 to {MAX_STEPS}")
    require("topic", isinstance(config.topic, str), "a text")


def _is_address(value: object) -> bool:
    return isinstance(value, str) and value.split("://")[0] in ("tcp", "ipc", "inproc") and "://" in value

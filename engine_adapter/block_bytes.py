"""Size of an engine's KV blocks, by which placement prices their transfer."""

from __future__ import annotations

import logging
from pathlib import Path

from kvferry.engine_adapter.engine import EngineFacts
from kvferry.model_files.memory_needs import config_needs
from kvferry.model_files.source import read_json
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.layout import DTYPE_BYTES

log = logging.getLogger("kvferry.adapter")

DEFAULT_DTYPE = "bfloat16"
"""Number format of a model whose config.json names none that is known."""


def block_bytes(facts: EngineFacts, per_token: int) -> int:
    """Return the bytes of a block. per_token: as configured; 0: from the model's config.json; 0 if unreadable.

    An engine that shards the cache over devices holds the same number of bytes in total."""
    if per_token:
        return per_token * facts.block_size
    try:
        config = read_json(Path(facts.model) / "config.json")
        named = str(config.get("dtype") or config.get("torch_dtype"))
        dtype = "float8_e4m3fn" if "fp8" in facts.arithmetic else named if named in DTYPE_BYTES else DEFAULT_DTYPE
        needs = config_needs(config)
        return needs.layout(dtype, facts.block_size).numbers * DTYPE_BYTES[dtype]
    except (ConfigError, OSError) as error:
        log.warning("the size of KV blocks is unknown, transfers count as free: set --kv-bytes-per-token (%s)", error)
        return 0

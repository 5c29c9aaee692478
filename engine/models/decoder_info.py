"""ModelInfo of our own decoders, computed from their config: KV sizes, vocabulary, longest sequence, revision."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvferry.engine.models.base import ModelInfo
from kvferry.engine.models.config import DecoderConfig
from kvferry.model_files.source import ModelSource


def decoder_info(source: ModelSource, config: DecoderConfig, max_model_len: int, forms: Iterable[str]) -> ModelInfo:
    """Return the facts of a decoder. forms: formats of its weights and positions that differ from the config's."""
    cached = config.cached
    return ModelInfo(
        name=source.name,
        revision="+".join((source.revision, *forms)),
        num_layers=len(cached),
        num_kv_heads=cached[0].kv_heads,
        head_dim=cached[0].head_dim,
        planes=cached[0].planes,
        layers=cached if len(set(cached)) > 1 else (),
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        state_parts=tuple(map(math.prod, config.states)),
    )

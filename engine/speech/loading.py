"""Loads a Whisper checkpoint in transformers' layout, and chooses number formats of its encoder and decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvferry.engine.models.directory import open_directory
from kvferry.engine.models.loader import auto_dtype
from kvferry.engine.speech.batch import SpeechBatch
from kvferry.engine.speech.decoder import Decoder
from kvferry.engine.speech.encoder import Encoder
from kvferry.engine.speech.modules import ModuleReader
from kvferry.kernels.ops import Ops
from kvferry.model_files.source import ModelSource
from kvferry.model_files.speech_config import SpeechConfig

_ENCODER_TENSORS, _DECODER_TENSORS = 15, 24
"""Tensors of a layer."""


@dataclass(frozen=True, slots=True)
class Formats:
    """Number formats of encoder and decoder. The decoder's K/V cache uses the decoder's format.

    A decode step reads all weights for a few tokens, so compiled kernels run it in bfloat16. The encoder multiplies
    1,500 rows at once, which PyTorch does faster in float32 where the processor does not multiply bfloat16."""

    encoder: torch.dtype
    decoder: torch.dtype

    @classmethod
    def of(cls, name: str, device: torch.device, ops: Ops) -> Formats:
        """Return the formats for a value of --dtype."""
        if name != "auto":
            return cls(getattr(torch, name), getattr(torch, name))
        return cls(auto_dtype(device, compiled=False), auto_dtype(device, compiled=ops.name == "cpu"))


def load_whisper(
    source: ModelSource,
    config: SpeechConfig,
    formats: Formats,
    ops: Ops,
    kv: torch.Tensor,
    progress: Callable[[float], None] | None = None,
) -> tuple[Encoder, Decoder, SpeechBatch]:
    """Load encoder and decoder onto the pool's device. Raises ConfigError naming a tensor that is missing."""
    weights = open_directory(source.path, None, lambda name: name.removeprefix("model."))
    total = 8 + _ENCODER_TENSORS * config.encoder_layers + _DECODER_TENSORS * config.decoder_layers
    count = 0

    def read() -> None:
        nonlocal count
        count += 1
        if progress is not None:
            progress(min(1.0, count / total))

    readers = [
        ModuleReader(weights, kv.device, dtype, ops, config.width, read) for dtype in (formats.encoder, formats.decoder)
    ]
    encoder = Encoder(readers[0], config, ops)
    decoder = Decoder(readers[1], config, ops, kv)
    return encoder, decoder, SpeechBatch(decoder, config, ops, kv.device)

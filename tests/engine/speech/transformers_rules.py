"""Transformers' rules of what Whisper may write next."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from kvferry.model_files.speech_config import SpeechConfig


def processed(config: SpeechConfig, written: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """Return logits [1, vocabulary] of the token behind those written, as its processors leave them."""
    told = SimpleNamespace(
        no_timestamps_token_id=config.tokens.no_timestamps, eos_token_id=config.tokens.end,
        bos_token_id=config.tokens.end, max_initial_timestamp_index=config.max_initial_timestamp,
    )  # fmt: skip
    left = logits.clone()
    for processor in (
        SuppressTokensLogitsProcessor(list(config.suppressed)),
        SuppressTokensAtBeginLogitsProcessor(list(config.suppressed_first), 0),
        WhisperTimeStampLogitsProcessor(told, begin_index=0),  # type: ignore[arg-type]
    ):
        left = processor(torch.tensor([list(written)], dtype=torch.int64), left)
    return left

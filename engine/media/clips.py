"""Decodes a request's audio file to mono samples, with a bound on its length."""

from __future__ import annotations

import torch

from kvferry.engine.speech.audio import AudioFile
from kvferry.engine.speech.log_mel import RATE

__all__ = ("RATE", "clip")


def clip(data: bytes, field: str, max_seconds: float, bound: str = "this model's limit") -> torch.Tensor:
    """Return the mono samples of an audio file at `RATE`, float32 in -1 … 1.

    Raises InvalidRequest naming the field. bound: who sets max_seconds, for errors."""
    file = AudioFile(data, max_seconds, field, bound)
    try:
        return file.read(int(max_seconds * RATE) + 1)
    finally:
        file.close()

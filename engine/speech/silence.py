"""Finds leading silence in audio, which is skipped without running the model."""

from __future__ import annotations

import torch

from kvferry.engine.speech.log_mel import HOP

LOUD = 10 ** (-55 / 20)
"""Root mean square of a frame's samples from which on it may be speech, as a share of full scale."""
MIN_FRAMES = 100
"""Shortest silence that is skipped, in frames of 0.01 s."""
LEAD_FRAMES = 20
"""Frames before the first sound that are not skipped."""


def leading_silence(samples: torch.Tensor, *, last: bool) -> int:
    """Return the frames of silence at the begin that can be skipped. last: nothing follows these samples."""
    whole = len(samples) // HOP
    powers = samples[: whole * HOP].view(whole, HOP).square().mean(1)
    loud = (powers >= LOUD**2).nonzero()
    if last and not len(loud):
        return whole
    first = int(loud[0]) if len(loud) else whole
    return first - LEAD_FRAMES if first >= MIN_FRAMES else 0

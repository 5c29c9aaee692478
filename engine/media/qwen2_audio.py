"""Audio family of Qwen2-Audio: a Whisper encoder over 30 s, whose output is averaged in pairs, one token per 0.04 s."""

from __future__ import annotations

from math import ceil

import torch
import torch.nn.functional as F

from kvferry.engine.media.audio_family import AudioFamily
from kvferry.engine.media.media_family import Tower

_MAX_SHIFT = 2
"""Frames after a clip that the convolutions of its last positions reach."""


class Qwen2Audio(AudioFamily):
    """The tower computes only a clip's own positions: the rest is silence, which attention leaves out."""

    def __init__(self, tower: Tower, token: str) -> None:
        super().__init__(tower, token)
        self.max_seconds = tower.processor.chunk_length

    def tokens(self, samples: int) -> int:
        return self._positions(samples) // 2

    def rows(self, samples: torch.Tensor) -> torch.Tensor:
        module, own = self.tower.module, self.tower.module.audio_tower
        count = self._positions(len(samples))
        mel = self._mel(samples)[None, :, : 2 * count + _MAX_SHIFT]
        x = F.gelu(own.conv2(F.gelu(own.conv1(mel)))).transpose(1, 2)[:, :count]
        x = x + own.embed_positions.weight[:count]
        for layer in own.layers:
            x = layer(x, None)
        x = own.avg_pooler(x.transpose(1, 2)).transpose(1, 2)
        found: torch.Tensor = module.multi_modal_projector(own.layer_norm(x))[0]
        return found

    def _positions(self, samples: int) -> int:
        """Return how many positions of the tower a clip takes."""
        frames: int = ceil(samples / self.tower.processor.hop_length)
        return (frames + 1) // 2

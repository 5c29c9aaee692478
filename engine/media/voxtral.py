"""Audio family of Voxtral: a Whisper encoder over windows of 30 s, each of which takes 375 tokens."""

from __future__ import annotations

from math import ceil

import torch

from kvferry.engine.media.audio_family import AudioFamily
from kvferry.engine.media.media_family import Tower

MAX_CLIP_S = 600.0
"""Longest clip, in seconds. The model hears more; this bounds the memory of one clip's samples and spectrogram."""


class Voxtral(AudioFamily):
    """The tower hears a clip window by window, the last one padded with silence."""

    max_seconds = MAX_CLIP_S

    def __init__(self, tower: Tower, token: str) -> None:
        super().__init__(tower, token)
        own = tower.config.audio_config
        self._window_tokens: int = own.max_source_positions * own.hidden_size // own.intermediate_size

    def tokens(self, samples: int) -> int:
        window: int = self.tower.processor.n_samples
        return ceil(samples / window) * self._window_tokens

    def rows(self, samples: torch.Tensor) -> torch.Tensor:
        windows = torch.split(self._mel(samples), self.tower.processor.nb_max_frames, 1)
        return torch.cat([self.tower.module.get_audio_features(each[None]).pooler_output for each in windows])

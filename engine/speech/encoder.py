"""Whisper's encoder: from a window's spectrogram to one vector for each 0.02 s, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kvferry.engine.speech.modules import EPS, EncoderLayer, ModuleReader
from kvferry.kernels.cpu import CpuOps
from kvferry.kernels.cpu.full_attention import fits, full_attention
from kvferry.kernels.ops import Ops
from kvferry.model_files.speech_config import SpeechConfig


class Encoder:
    """Encoder of one window at a time, layer by layer, so that decode steps can run in between."""

    def __init__(self, reader: ModuleReader, config: SpeechConfig, ops: Ops) -> None:
        self._ops, self._heads = ops, config.encoder_heads
        self._conv1 = _convolution(reader, "encoder.conv1", config.mels, config.width)
        self._conv2 = _convolution(reader, "encoder.conv2", config.width, config.width)
        self._places = reader.tensor("encoder.embed_positions.weight", config.positions, config.width)
        self._layers = [
            EncoderLayer(reader.self_attention(name), reader.mlp(name, config.encoder_mlp))
            for name in (f"encoder.layers.{index}" for index in range(config.encoder_layers))
        ]
        self._norm = reader.norm("encoder.layer_norm")

    @property
    def dtype(self) -> torch.dtype:
        """Return the number format."""
        return self._places.dtype

    def steps(self, mel: torch.Tensor) -> Iterator[torch.Tensor | None]:
        """Yield None after each part of the work, and finally the output [positions, width] of mel [mels, frames]."""
        x = mel.to(self._places.device, self._places.dtype)[None]
        x = F.gelu(F.conv1d(x, *self._conv1, padding=1))
        x = F.gelu(F.conv1d(x, *self._conv2, stride=2, padding=1))
        x = x[0].T + self._places
        yield None
        for layer in self._layers:
            x = self._layer(x, layer)
            yield None
        yield self._ops.layer_norm(x, self._norm, EPS)

    def _layer(self, x: torch.Tensor, layer: EncoderLayer) -> torch.Tensor:
        own, (length, width) = layer.attention, x.shape
        qkv = own.qkv(self._ops.layer_norm(x, own.norm, EPS))
        q, k, v = qkv.view(length, 3, self._heads, -1).permute(1, 2, 0, 3)[:, None]
        mixed = self._attention(q, k, v).reshape(length, width)
        return layer.mlp.add_to(x + own.out(mixed), self._ops)

    def _attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return [1, T, heads, dim] of queries, keys and values [1, heads, T, dim]."""
        if isinstance(self._ops, CpuOps) and fits(q, v):
            return full_attention(self._ops, q, k, v, q.shape[-1] ** -0.5)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _convolution(reader: ModuleReader, name: str, inputs: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return reader.tensor(f"{name}.weight", width, inputs, 3), reader.tensor(f"{name}.bias", width)

"""ImageFamily: base class of model families with a vision tower, which resizes and normalises images for it."""

from __future__ import annotations

import hashlib
import threading
from abc import abstractmethod
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from kvferry.engine.media.media_family import Grid, MediaFamily, Tower
from kvferry.engine.media.pictures import picture
from kvferry.protocol.errors import InvalidRequest

MAX_PREPARED_BYTES = 64 * 2**20
"""Largest size of the resized images that a node keeps until it encodes them, in bytes."""


@dataclass(frozen=True, slots=True)
class Pixels:
    """Resized image. values: uint8, in the shape that its family's tower takes, before normalisation."""

    values: np.ndarray
    grid: Grid


class PreparedImages:
    """Resized images between the rendering of their prompt and their encoding, bounded by bytes. Thread-safe.

    Each is taken once, because its rows are cached then. The oldest are evicted first and are resized again."""

    def __init__(self, max_bytes: int = MAX_PREPARED_BYTES) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._kept: OrderedDict[bytes, Pixels] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, file: bytes, pixels: Pixels) -> None:
        """Keep the resized image of a file, unless it alone exceeds the bound."""
        if pixels.values.nbytes > self._max_bytes:
            return
        name = hashlib.sha256(file).digest()
        with self._lock:
            self._drop(name)
            self._kept[name] = pixels
            self._bytes += pixels.values.nbytes
            while self._bytes > self._max_bytes:
                self._drop(next(iter(self._kept)))

    def take(self, file: bytes) -> Pixels | None:
        """Return the resized image of a file, which is no longer kept; None if it is not here."""
        with self._lock:
            return self._drop(hashlib.sha256(file).digest())

    def _drop(self, name: bytes) -> Pixels | None:
        if (pixels := self._kept.pop(name, None)) is not None:
            self._bytes -= pixels.values.nbytes
        return pixels


class ImageFamily(MediaFamily):
    """Base class of one family's image processing. `pixels` is thread-safe. channels: their dimension in pixels."""

    modality = "image"
    channels = -3

    def __init__(self, tower: Tower, token: str, placeholder: str) -> None:
        super().__init__(tower, token, placeholder)
        self._normalised, self._prepared = _normalised(tower.processor), PreparedImages()

    @abstractmethod
    def pixels(self, picture: Image.Image) -> Pixels:
        """Return the resized picture. Raises ValueError for one that the family cannot take."""

    @abstractmethod
    def rows(self, pixels: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Return [n, hidden * (1 + levels)] of normalised pixels, in the tower's dtype, for its n image tokens."""

    def grid(self, file: bytes, field: str) -> Grid:
        pixels = self._pixels(file, field)
        self._prepared.put(file, pixels)
        return pixels.grid

    def encoded(self, file: bytes) -> torch.Tensor:
        pixels = self._prepared.take(file) or self._pixels(file, "messages")
        axes = tuple(axis for axis in range(pixels.values.ndim) if axis != self.channels % pixels.values.ndim)
        channel = np.expand_dims(np.arange(len(self._normalised)), axes)
        values = torch.from_numpy(self._normalised[channel, pixels.values])
        module = self.tower.module
        return self.rows(values.to(module.device, module.dtype), pixels.grid)

    def _pixels(self, file: bytes, field: str) -> Pixels:
        found = picture(file, field)
        try:
            return self.pixels(found)
        except ValueError as error:
            problem = f"{field}: the model takes no image of {found.width} x {found.height} pixels"
            raise InvalidRequest(problem, param=field) from error

    def _preprocessed(self, images: Any, **options: Any) -> Any:
        """Return the processor's result for images, without rescaling and normalisation: still in 8 bits."""
        return self.tower.processor.preprocess(images, do_rescale=False, do_normalize=False, **options)


def _normalised(processor: Any) -> np.ndarray:
    """Return float32 [channels, 256]: the normalised value of each 8-bit value in each channel."""
    values = np.broadcast_to(np.arange(256, dtype=np.uint8), (3, 1, 256))
    if processor.do_rescale:
        values = processor.rescale(values, processor.rescale_factor)
    if processor.do_normalize:
        values = processor.normalize(values, processor.image_mean, processor.image_std)
    return np.ascontiguousarray(values[:, 0], dtype=np.float32)

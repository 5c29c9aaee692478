"""Image family of Gemma 3: each image is one square, whose tokens attend to each other."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from kvferry.engine.media.image_family import ImageFamily, Pixels
from kvferry.engine.media.media_family import Grid, Placeholders, Tower


class Gemma3(ImageFamily):
    """Grid: empty, all images have the same number of tokens. Pixels: [3, side, side]. There is no pan and scan."""

    bidirectional = True

    def __init__(self, tower: Tower, image: str, begin: str, end: str) -> None:
        super().__init__(tower, image, begin)
        self._texts = Placeholders(image * tower.config.mm_tokens_per_image, f"\n\n{begin}", f"{end}\n\n")

    def pixels(self, picture: Image.Image) -> Pixels:
        found = self._preprocessed(picture, do_pan_and_scan=False)
        return Pixels(np.asarray(found["pixel_values"][0], np.uint8), ())

    def placeholders(self, grid: Grid) -> Placeholders:
        return self._texts

    def rows(self, pixels: torch.Tensor, grid: Grid) -> torch.Tensor:
        found: torch.Tensor = self.tower.module.get_image_features(pixels[None]).pooler_output[0]
        return found

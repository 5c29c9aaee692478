"""Image family of Mistral Small 3.1 and later: the Pixtral tower, whose rows of patches end with a token of text."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from kvferry.engine.media.image_family import ImageFamily, Pixels
from kvferry.engine.media.media_family import Grid, Placeholders, Tower

_BREAK, _END = "[IMG_BREAK]", "[IMG_END]"


class Mistral3(ImageFamily):
    """Grid: rows and columns of merged patches. Pixels: [3, height, width]."""

    mixed = True

    def __init__(self, tower: Tower, image: str) -> None:
        super().__init__(tower, image, image)
        self._patch = tower.config.vision_config.patch_size * tower.config.spatial_merge_size

    def pixels(self, picture: Image.Image) -> Pixels:
        found = self._preprocessed(picture, patch_size=self._patch)
        values = np.asarray(found["pixel_values"][0], np.uint8)
        return Pixels(values, (values.shape[1] // self._patch, values.shape[2] // self._patch))

    def placeholders(self, grid: Grid) -> Placeholders:
        rows, columns = grid
        return Placeholders(_BREAK.join([self.token * columns] * rows) + _END)

    def rows(self, pixels: torch.Tensor, grid: Grid) -> torch.Tensor:
        sizes = torch.tensor([pixels.shape[1:]])
        found: torch.Tensor = self.tower.module.get_image_features(pixels[None], sizes).pooler_output[0]
        return found

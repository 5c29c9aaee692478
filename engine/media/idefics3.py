"""Image family of Idefics 3 and SmolVLM: an image becomes tiles in rows and columns, then the whole image."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from kvferry.engine.media.image_family import ImageFamily, Pixels
from kvferry.engine.media.media_family import Grid, Placeholders, Tower

_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"


class Idefics3(ImageFamily):
    """Grid: rows and columns of tiles; 0 and 0 for an image no larger than one tile. Pixels: [tiles, 3, h, w]."""

    mixed = True

    def __init__(self, tower: Tower, image: str) -> None:
        super().__init__(tower, image, image)
        config = tower.config
        side = config.vision_config.image_size // config.vision_config.patch_size
        self._each = int(side**2 / config.scale_factor**2)

    def pixels(self, picture: Image.Image) -> Pixels:
        found = self._preprocessed([[picture]], return_row_col_info=True, return_tensors="np")
        values: np.ndarray = found["pixel_values"][0]
        return Pixels(values.astype(np.uint8), (found["rows"][0][0], found["cols"][0][0]))

    def placeholders(self, grid: Grid) -> Placeholders:
        rows, columns = grid
        tokens, whole = self.token * self._each, f"{_AROUND}{_WHOLE}"
        if not rows:
            return Placeholders(f"{whole}{tokens}{_AROUND}")
        tiles = "".join(
            "".join(f"{_AROUND}<row_{row + 1}_col_{column + 1}>{tokens}" for column in range(columns)) + "\n"
            for row in range(rows)
        )
        return Placeholders(f"{tiles}\n{whole}{tokens}{_AROUND}")

    def rows(self, pixels: torch.Tensor, grid: Grid) -> torch.Tensor:
        return torch.cat(list(self.tower.module.get_image_features(pixels[None]).pooler_output))

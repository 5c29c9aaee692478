"""Image family of Qwen2-VL to Qwen3.5: patches in the order of merged squares, and three rotary positions a token."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from kvferry.engine.media.image_family import ImageFamily, Pixels
from kvferry.engine.media.media_family import Grid, Placeholders, Tower


class QwenVL(ImageFamily):
    """Grid: rows and columns of patches. Pixels: [patches, 3, side, side]; the tower takes each twice, as two frames.

    Qwen3-VL has levels after the first layers (deepstack)."""

    def __init__(self, tower: Tower, image: str) -> None:
        super().__init__(tower, image, image)
        vision = tower.config.vision_config
        self._merge, self._frames = vision.spatial_merge_size, vision.temporal_patch_size
        self._patch = vision.patch_size
        self._levels = len(getattr(vision, "deepstack_visual_indexes", ()))

    @property
    def levels(self) -> int:
        return self._levels

    def pixels(self, picture: Image.Image) -> Pixels:
        found = self._preprocessed(picture, return_tensors="np")
        patches: np.ndarray = found["pixel_values"].reshape(-1, 3, self._frames, self._patch, self._patch)[:, :, 0]
        _, rows, columns = (int(each) for each in found["image_grid_thw"][0])
        return Pixels(patches.astype(np.uint8), (rows, columns))

    def placeholders(self, grid: Grid) -> Placeholders:
        rows, columns = grid
        return Placeholders(self.token * (rows * columns // self._merge**2))

    def rows(self, pixels: torch.Tensor, grid: Grid) -> torch.Tensor:
        patches = pixels[:, :, None].expand(-1, -1, self._frames, -1, -1).flatten(1)
        found = self.tower.module.get_image_features(patches, torch.tensor([[1, *grid]], device=pixels.device))
        levels = found.deepstack_features if self._levels else ()
        return torch.cat((found.pooler_output[0], *(level[0] for level in levels)), 1)

    def positions(self, grid: Grid) -> torch.Tensor:
        rows, columns = (each // self._merge for each in grid)
        row, column = torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)
        return torch.stack((torch.zeros_like(row), row, column))

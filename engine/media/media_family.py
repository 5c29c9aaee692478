"""MediaFamily: base class of model families with images or audio: placeholders of a medium, and its tower's rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

Grid = tuple[int, ...]
"""Numbers that give a medium's placeholders and positions, such as rows and columns of patches."""


@dataclass(frozen=True, slots=True)
class Placeholders:
    """Texts that stand for one medium in a prompt.

    own: the tokens of this text have rows. before, behind: ordinary texts around it."""

    own: str
    before: str = ""
    behind: str = ""


@dataclass(frozen=True, slots=True)
class Tower:
    """Vision or audio part of a checkpoint: transformers' model without its text, its config, and its processor."""

    module: Any
    config: Any
    processor: Any


class MediaFamily(ABC):
    """Base class of one family's media processing; media are files' bytes. Grids and placeholders are thread-safe.

    token: text of the token whose rows come from the tower. placeholder: what chat templates write for a medium.
    bidirectional: see `MediaEncoder`. mixed: tokens of text lie between those of a medium. levels: see
    `kernels.media_rows`.
    """

    modality: str
    bidirectional = mixed = False

    def __init__(self, tower: Tower, token: str, placeholder: str) -> None:
        self.tower, self.token, self.placeholder = tower, token, placeholder

    @property
    def levels(self) -> int:
        """Return how many levels the rows have."""
        return 0

    @abstractmethod
    def grid(self, file: bytes, field: str) -> Grid:
        """Return a file's grid. Raises InvalidRequest naming the field for one that the family cannot take."""

    def grids(self, files: Iterable[tuple[bytes, str]]) -> list[Grid]:
        """Return the grids of one request's files, each with its field. Raises InvalidRequest as `grid` does."""
        return [self.grid(file, field) for file, field in files]

    @abstractmethod
    def placeholders(self, grid: Grid) -> Placeholders:
        """Return the texts of a medium."""

    @abstractmethod
    def encoded(self, file: bytes) -> torch.Tensor:
        """Return [n, hidden * (1 + levels)], in the tower's dtype, for the n tokens of a file that come from the tower.

        Raises InvalidRequest as `grid` does."""

    def positions(self, grid: Grid) -> torch.Tensor | None:
        """Return int64 [3, n], rotary positions of a medium's tokens from 0 on; None: they are ordinary."""
        return None

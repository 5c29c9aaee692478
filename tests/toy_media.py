"""An encoder of toy media and a source of their rows, which tests count, hold and break."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from kvferry.engine.media.encoder import Ready
from kvferry.protocol.media import MediaItem, RenderedPrompt, RenderRequest
from kvferry.protocol.messages import DecodeTarget
from kvferry.worker.engine_parts import EngineParts
from tests.toy import make_engine
from tests.worker_pair import of_toy

WIDTH = 3
"""Numbers of a row."""


def picture(name: str, offset: int = 0, length: int = 5) -> MediaItem:
    return MediaItem("image", name, offset, length, name.encode() * 3)


def rows_of(item: MediaItem) -> torch.Tensor:
    """The rows of a toy medium: a function of its data."""
    start = float(sum(item.data) % 1000)
    return torch.arange(item.length * WIDTH, dtype=torch.float32).view(item.length, WIDTH) + start


class ToyEncoder:
    """Implements `MediaEncoder`."""

    modalities, width, bidirectional = frozenset(("image",)), WIDTH, False

    def render(self, request: RenderRequest) -> RenderedPrompt:
        raise NotImplementedError

    def encode(self, items: Sequence[MediaItem]) -> list[torch.Tensor]:
        return [rows_of(item) for item in items]

    def rope_positions(self, token_ids: Sequence[int], media: Sequence[MediaItem]) -> torch.Tensor | None:
        return None


class ToySource:
    """Implements `EmbeddingSource` on a thread per call. made: names of the media encoded so far. `go` holds it back
    while it is clear; `error` is what calls end with."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.asked = self.cancelled = 0
        self.error: Exception | None = None
        self.go = threading.Event()
        self.go.set()

    def submit(
        self,
        root: bytes,
        items: Sequence[MediaItem],
        ready: Ready,
        deadline_s: float,
        encoder: DecodeTarget | None = None,
    ) -> Callable[[], None]:
        def work() -> None:
            self.go.wait(15.0)
            self.made += [item.hash for item in items]
            ready(self.error or ToyEncoder().encode(items))

        self.asked += 1
        threading.Thread(target=work, daemon=True).start()
        return self._cancel

    def _cancel(self) -> None:
        self.cancelled += 1


def with_encoder(source: ToySource, num_blocks: int = 64) -> EngineParts:
    """A toy engine beside a toy encoder."""
    return of_toy(make_engine(num_blocks, encoder=ToyEncoder(), embeddings=source))

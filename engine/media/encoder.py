"""Interfaces MediaEncoder (a model's processor and towers) and EmbeddingSource (which provides media's embeddings)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kvferry.protocol.media import MediaItem, RenderedPrompt, RenderRequest
from kvferry.protocol.messages import DecodeTarget

Ready = Callable[[Sequence[torch.Tensor] | Exception], None]
"""Called once, on any thread, with the rows of all media that were asked for, in order, or with what went wrong."""


class MediaEncoder(Protocol):
    """Processor and towers of one model.

    `render` runs on threads of its own; `encode` on one thread at a time, under `torch.inference_mode()`.

    modalities: media that it takes, of protocol.media.MODALITIES. width: numbers of a token's row: the hidden size, and
    as much again for each level (see `kernels.media_rows`). bidirectional: tokens of one item attend to each other
    (`BatchPlan.see_until`), so that a step computes all of them."""

    modalities: frozenset[str]
    width: int
    bidirectional: bool

    def render(self, request: RenderRequest) -> RenderedPrompt:
        """Return the prompt of a chat with its files. The items hold what `encode` needs.

        An item's hash covers its content and all that its rows depend on. Raises InvalidRequest naming the field."""
        ...

    def encode(self, items: Sequence[MediaItem]) -> list[torch.Tensor]:
        """Return each item's rows [item.length, width], in the model's dtype, on its device."""
        ...

    def rope_positions(self, token_ids: Sequence[int], media: Sequence[MediaItem]) -> torch.Tensor | None:
        """Return int64 [3, len(token_ids)], the rotary positions (time, height, width) of a prompt's tokens.

        Those of later tokens continue, equal in all three, after the largest of them. None: positions are ordinary."""
        ...


class EmbeddingSource(Protocol):
    """Source of media's rows: a cache, another node, or this node's encoder. Thread-safe."""

    def submit(
        self,
        root: bytes,
        items: Sequence[MediaItem],
        ready: Ready,
        deadline_s: float,
        encoder: DecodeTarget | None = None,
    ) -> Callable[[], None]:
        """Request the rows of some media; return a function that cancels the call, after which `ready` may still come.

        root: of the block hashes of the request; rows are shared by requests of one root only, so that no tenant learns
        which media another sent. encoder: that of the job, from which rows may be fetched. `ready` may come before
        this call returns."""
        ...

"""PromptMedia: images, audio and video of a prompt as a node has prepared them, and the time to encode them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvferry.placement.encoders import expected_s
from kvferry.placement.types import Placement
from kvferry.protocol.media import MediaItem
from kvferry.router.nodes.model_nodes import ModelNodes


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class PromptMedia:
    """Images, audio and video of a prompt, prepared for the nodes of one fingerprint.

    rope_offset: see RenderedPrompt."""

    items: tuple[MediaItem, ...]
    fingerprint: str
    rope_offset: int = 0

    @property
    def modalities(self) -> frozenset[str]:
        """Return the modalities of the items."""
        return frozenset(item.modality for item in self.items)

    @property
    def size(self) -> int:
        """Return the bytes that the items take in memory."""
        return sum(item.size for item in self.items)

    def tokens(self, modality: str) -> int:
        """Return how many tokens of the prompt stand for items of this modality."""
        return sum(item.length for item in self.items if item.modality == modality)


@dataclass(frozen=True, slots=True)
class RenderedMedia:
    """A prompt with media: its tokens, with placeholders, and the media themselves."""

    token_ids: tuple[int, ...]
    media: PromptMedia


def with_encoding(placement: Placement, media: PromptMedia, model: ModelNodes) -> Placement:
    """Return the placement with the seconds that encoding the media takes before its first token."""
    tokens = sum(item.length for item in media.items if item.offset + item.length > placement.cached_len)
    if not tokens:
        return placement
    computes = placement.prefill or placement.decode
    leases = [*(entry.lease for entry in model.encoders), *((computes,) if computes else ())]
    seconds = expected_s(tokens, (lease.rates.media_tokens_per_s for lease in leases))
    return replace(placement, first_token_s=placement.first_token_s + seconds)

"""Media support of a node's model: loads its encoder of images and audio, and reads the limits of a prompt."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvferry.engine.media.encoder import MediaEncoder
from kvferry.engine.media.loader import load_media_encoder
from kvferry.engine.media.local_embeddings import LocalEmbeddings
from kvferry.model_files.source import ModelSource
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.media import MAX_ITEMS, MODALITIES
from kvferry.protocol.settings import WorkerSettings

log = logging.getLogger("kvferry.worker")

GB = 10**9


@dataclass(frozen=True, slots=True)
class NodeMedia:
    """Media encoder of a node's model, and the source of its embeddings.

    limits: maximum number of items in a prompt by modality, for modalities that have a limit."""

    encoder: MediaEncoder
    embeddings: LocalEmbeddings
    limits: Mapping[str, int]

    @property
    def modalities(self) -> tuple[str, ...]:
        """Return the modalities that prompts may contain."""
        return tuple(each for each in MODALITIES if each in self.encoder.modalities and self.limits.get(each, 1))


def load_media(
    settings: WorkerSettings, source: ModelSource, dtype: torch.dtype, device: torch.device
) -> NodeMedia | None:
    """Load the encoder of a model's images and audio; None if prompts contain only text.

    Dummy weights have no processor. With several ranks, rank 0 encodes. Raises ConfigError naming the flag."""
    limits = read_limits(settings.limit_mm_per_prompt)
    off = settings.language_model_only or all(limits.get(each) == 0 for each in MODALITIES)
    if off or settings.load_format == "dummy":
        return None
    encoder = load_media_encoder(source, dtype=dtype, device=device)
    if encoder is None:
        return None
    media = NodeMedia(encoder, LocalEmbeddings(encoder, int(settings.mm_processor_cache_gb * GB), device), limits)
    log.info("prompts may contain %s", ", ".join(media.modalities) or "only text")
    return media if media.modalities else None


def read_limits(given: str) -> Mapping[str, int]:
    """Return the maximum number of items in a prompt by modality, from a JSON object. Raises ConfigError."""
    try:
        limits = json.loads(given) if given else {}
    except ValueError as error:
        raise _wrong(given) from error
    numbers = isinstance(limits, dict) and all(type(each) is int and 0 <= each <= MAX_ITEMS for each in limits.values())
    if not numbers or set(limits) - set(MODALITIES):
        raise _wrong(given)
    return limits


def _wrong(given: str) -> ConfigError:
    return ConfigError(
        f"--limit-mm-per-prompt takes a JSON object of numbers from 0 to {MAX_ITEMS} for {', '.join(MODALITIES)}, such "
        f'as {{"image": 4}}; got {given!r}',
        param="limit_mm_per_prompt",
    )

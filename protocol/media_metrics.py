"""Worker metrics of images, audio and video in prompts: encoded, cached, waiting and rendered."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from kvferry.protocol.labels import MEDIA_OUTCOMES
from kvferry.protocol.media import MODALITIES
from kvferry.protocol.model_metrics import ModelRegistry


class MediaMetrics:
    """Media metrics of a worker.

    items: by modality and outcome. seconds: of the encoder, by modality. cache_bytes, waiting: current values. renders:
    prompts made of chats."""

    def __init__(self, role: str, registry: ModelRegistry) -> None:
        items = registry.family(
            Counter,
            "kvferry_media_items",
            "Images, audios and videos for prompts, by outcome: encoded (by the model's tower), cached "
            "(encoded before), failed.",
            ["role", "modality", "outcome"],
        )
        self.items = {
            (modality, outcome): items.labels(role, modality, outcome)
            for modality in MODALITIES
            for outcome in MEDIA_OUTCOMES
        }
        seconds = registry.family(
            Counter,
            "kvferry_media_encode_seconds",
            "Seconds in which the model's tower encoded images, audios and videos.",
            ["role", "modality"],
        )
        self.seconds = {modality: seconds.labels(role, modality) for modality in MODALITIES}
        self.renders = registry.family(
            Counter, "kvferry_media_renders", "Prompts made of chats with images, audio or video.", ["role"]
        ).labels(role)
        self.cache_bytes = registry.family(
            Gauge, "kvferry_media_cache_bytes", "Bytes of encoded media that are kept for prompts to come.", ["role"]
        ).labels(role)
        self.waiting = registry.family(
            Gauge, "kvferry_media_waiting", "Images, audios and videos that wait for the encoder.", ["role"]
        ).labels(role)

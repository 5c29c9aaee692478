"""Settings of routers and nodes about images, audio and video in requests."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.common_settings import CommonSettings
from kvferry.protocol.setting import setting


@dataclass(frozen=True, kw_only=True)
class MediaSettings(CommonSettings):
    """Settings of a router about media."""

    allowed_media_domains: str = setting(
        "",
        "hosts from which a router fetches images, audio and video that requests name by URL, separated by commas; "
        "empty: requests must hold them as data URLs. Addresses that are not public are refused",
    )


@dataclass(frozen=True, kw_only=True)
class NodeMediaSettings(CommonSettings):
    """Settings of nodes with kvferry's own engine about media in prompts."""

    limit_mm_per_prompt: str = setting(
        "",
        'maximum images, audios and videos of a prompt, as a JSON object such as {"image": 4}; 0 turns one off; '
        "default: as many as the model and the router take",
    )
    language_model_only: bool = setting(
        False, "load no tower for images or audio: prompts hold only text, and the tower takes no memory"
    )
    mm_processor_cache_gb: float = setting(
        0.25, "GB of the model's representations of images and audio that each node keeps for later prompts; 0: none",
        min=0, max=2**20,
    )  # fmt: skip

"""Settings of routers about images, audio and video in requests."""

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

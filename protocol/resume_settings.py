"""Settings of routers about recording requests, so that clients can resume streams after a break."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.common_settings import CommonSettings
from kvferry.protocol.setting import setting


@dataclass(frozen=True, kw_only=True)
class ResumeSettings(CommonSettings):
    """Settings of a router about streams that clients resume."""

    resume_window: float = setting(
        60.0, "seconds after a break or an end for which clients can resume an answer; 0: off", min=0
    )
    resume_record_kib: int = setting(
        1024,
        "largest request with its tokens that is recorded for resumption, in KiB; larger ones run without",
        min=1,
    )
    resume_store_mib: int = setting(
        64, "MiB of recorded requests per tenant; those that expire first are evicted first", min=1
    )

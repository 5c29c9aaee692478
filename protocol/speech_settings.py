"""Settings of a node that transcribes speech with Whisper: the longest audio file."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.node_settings import NodeSettings
from kvferry.protocol.setting import setting


@dataclass(frozen=True, kw_only=True)
class SpeechSettings(NodeSettings):
    """Settings of a node whose model is Whisper."""

    max_audio_seconds: float = setting(
        14_400.0, "longest audio file that is transcribed, in seconds; longer ones get 400", min=1
    )

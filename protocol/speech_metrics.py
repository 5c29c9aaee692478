"""Metrics of a node that transcribes speech: seconds of audio and silence, windows, fallbacks and tokens."""

from __future__ import annotations

from prometheus_client import Counter

from kvferry.protocol.model_metrics import ModelRegistry


class SpeechMetrics:
    """Counters of transcription. All exist from the start, at zero."""

    def __init__(self, registry: ModelRegistry) -> None:
        def counter(name: str, help: str) -> Counter:
            return registry.family(Counter, name, help, [])

        self.audio_seconds = counter("kvferry_speech_audio_seconds", "Seconds of audio that were transcribed.")
        self.silent_seconds = counter("kvferry_speech_silent_seconds", "Seconds of silence that were skipped.")
        self.windows = counter("kvferry_speech_windows", "Windows of audio that were encoded.")
        self.fallbacks = counter(
            "kvferry_speech_fallbacks",
            "Texts of windows that looked wrong and were drawn again at a higher temperature.",
        )
        self.tokens = counter("kvferry_speech_tokens", "Tokens that the decoder drew, including those of fallbacks.")

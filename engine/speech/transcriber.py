"""Transcriber: transcribes one file, window by window; each window's prompt is the text before it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from kvferry.engine.speech.log_mel import EDGE, HOP, LogMel
from kvferry.engine.speech.loop import SpeechLoop
from kvferry.engine.speech.options import SpeechOptions
from kvferry.engine.speech.segments import FRAMES_PER_STEP, Cut, Segment, Word, cut
from kvferry.engine.speech.silence import leading_silence
from kvferry.engine.speech.track import Track
from kvferry.engine.speech.window import Attempt, Decoded, Reading, Window, compression_ratio
from kvferry.engine.speech.words import split_words, timed, word_times
from kvferry.model_files.speech_config import SpeechConfig

MAX_COMPRESSION, MIN_LOGPROB, NO_SPEECH = 2.4, -1.0, 0.6
"""Bounds beyond which a window's text counts as wrong, and the no-speech threshold (Radford et al. 2022)."""
FORGETS_ABOVE = 0.5
"""Temperature above which a window's text is not used as the next one's prompt."""
FRAMES_PER_S = 100
"""Spectrogram frames per second of audio."""
MIN_REST_FRAMES = 10
"""Fewest frames after the last complete segment that are transcribed: fewer hold no word, but the model writes one."""


@dataclass(frozen=True, slots=True)
class SpeechModel:
    """A model that is ready to transcribe."""

    config: SpeechConfig
    tokenizer: Tokenizer
    log_mel: LogMel
    loop: SpeechLoop


class Transcriber:
    """Transcription of one file. language: code; found in the first window that is not silent, unless given.

    windows, fallbacks: encoded windows, and texts that looked wrong. skipped: frames of silence."""

    def __init__(self, model: SpeechModel, track: Track, options: SpeechOptions) -> None:
        self._model, self._track, self._options = model, track, options
        self._tokens = model.config.tokens
        self.language, self.windows, self.fallbacks, self.skipped = options.language, 0, 0, 0
        self._peak, self._count = -math.inf, 0
        self._written = self._prompt_tokens(options.prompt)
        self._fresh = 0
        """Place in `written` from which on it is a prompt."""

    async def segments(self) -> AsyncIterator[Segment]:
        """Yield segments as their windows are decoded. Raises InvalidRequest for audio that cannot be decoded."""
        seek, count, min_samples = 0, self._model.config.frames * HOP, HOP
        while True:
            before = min(EDGE, seek * HOP)
            audio = await self._track.read(seek * HOP - before, before + count + EDGE)
            samples = audio[before : before + count]
            if len(samples) < min_samples:
                return
            min_samples = MIN_REST_FRAMES * HOP
            if quiet := leading_silence(samples, last=len(samples) < count):
                seek, self.skipped = seek + quiet, self.skipped + quiet
                continue
            frames = len(samples) // HOP
            found, ahead = await self._window(samples, frames, seek, (audio[:before], audio[before + count :]))
            for segment in found:
                yield segment
            seek += ahead

    async def _window(
        self, samples: torch.Tensor, frames: int, seek: int, around: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[list[Segment], int]:
        """Return the segments of a window, and the frames after which the next one begins.

        around: samples on both sides of it."""
        model = self._model
        padded = torch.zeros(model.config.frames * HOP)
        padded[: len(samples)] = samples
        mel, self._peak = await asyncio.to_thread(model.log_mel, padded, self._peak, *around)
        window, self.windows = Window(mel), self.windows + 1
        try:
            await asyncio.wrap_future(model.loop.encode(window))
            if not self.language:
                self.language = await self._spoken(window)
            decoded, temperature = await self._decoded(window)
            if decoded.no_speech_prob > NO_SPEECH and decoded.avg_logprob <= MIN_LOGPROB:
                self.language = self._options.language  # silence does not show the language
                return [], frames
            cuts, ahead = cut(decoded.tokens, self._tokens.timestamps, frames)
            words = await self._words(window, cuts, ahead, frames, seek) if self._options.words else None
        finally:
            model.loop.release(window)
        found = list[Segment]()
        for index, part in enumerate(cuts):
            if part.start < part.end and self._text(part.tokens).strip():
                found.append(self._segment(part, decoded, temperature, seek, frames, words[index] if words else ()))
                self._written += part.tokens
        if temperature > FORGETS_ABOVE:
            self._fresh = len(self._written)
        return found, min(max(ahead, FRAMES_PER_STEP), frames)

    async def _spoken(self, window: Window) -> str:
        """Return the most likely language of a window."""
        languages = self._tokens.languages
        logits = await asyncio.wrap_future(self._model.loop.read(Reading(window, [self._tokens.start], heads=False)))
        return languages[int(logits[[id for _, id in languages]].argmax())][0]

    async def _decoded(self, window: Window) -> tuple[Decoded, float]:
        """Return a window's text that looks right, or the last one, with its temperature."""
        prompt, start = self._prompt()
        limit = min(self._model.config.context // 2, self._model.config.context - len(prompt))
        for temperature in self._options.temperatures:
            attempt = Attempt(window, prompt, start, temperature, seed=len(self._written), limit=limit)
            decoded: Decoded = await asyncio.wrap_future(self._model.loop.decode(attempt))
            silent = decoded.no_speech_prob > NO_SPEECH and decoded.avg_logprob < MIN_LOGPROB
            repeats = compression_ratio(self._text(decoded.tokens)) > MAX_COMPRESSION
            if silent or not (repeats or decoded.avg_logprob < MIN_LOGPROB):
                break
            self.fallbacks += 1
        return decoded, temperature

    def _prompt(self) -> tuple[list[int], int]:
        """Return the decoder's prompt, and the place of its start token."""
        before = self._written[self._fresh :][-(self._model.config.context // 2 - 1) :]
        previous_text = [self._tokens.previous, *before] if before else []
        return [*previous_text, *self._beginning()], len(previous_text)

    def _beginning(self) -> list[int]:
        """Return start, language and task."""
        if not self._tokens.languages:
            return [self._tokens.start]
        task = self._tokens.translate if self._options.translate else self._tokens.transcribe
        return [self._tokens.start, dict(self._tokens.languages)[self.language], task]

    async def _words(self, window: Window, cuts: Sequence[Cut], ahead: int, frames: int, seek: int) -> list[list[Word]]:
        """Return the words of each segment, aligned over the whole window; none ends after the next one begins."""
        texts = [[token for token in part.tokens if token < self._tokens.end] for part in cuts]
        begin, text = self._beginning(), [token for tokens in texts for token in tokens]
        if not text:
            return [[] for _ in cuts]
        reading = Reading(window, [*begin, self._tokens.no_timestamps, *text, self._tokens.end], heads=True)
        scores = await asyncio.wrap_future(self._model.loop.read(reading))
        written_in = "en" if self._options.translate else self.language
        split = [split_words(self._model.tokenizer, tokens, written_in) for tokens in texts]
        lengths = [count for words in split for _, count in words]
        times = await asyncio.to_thread(word_times, scores, len(begin), lengths, max(1, frames // FRAMES_PER_STEP))
        found, at, last = [], 0, ahead / FRAMES_PER_S
        for words in split:
            within = [(min(start, last), min(end, last)) for start, end in times[at : at + len(words)]]
            found.append(timed(words, within, seek / FRAMES_PER_S))
            at += len(words)
        return found

    def _segment(
        self, part: Cut, decoded: Decoded, temperature: float, seek: int, frames: int, words: Sequence[Word]
    ) -> Segment:
        """Return a segment; the model may write times in the silence that fills the last window, after the audio."""
        offset, length, self._count = seek / FRAMES_PER_S, frames / FRAMES_PER_S, self._count + 1
        return Segment(
            id=self._count - 1,
            seek=seek,
            start=round(offset + min(part.start, length), 2),
            end=round(offset + min(part.end, length), 2),
            text=self._text(part.tokens),
            tokens=part.tokens,
            temperature=temperature,
            avg_logprob=decoded.avg_logprob,
            compression_ratio=compression_ratio(self._text(decoded.tokens)),
            no_speech_prob=decoded.no_speech_prob,
            words=tuple(words),
        )

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._model.tokenizer.decode([token for token in tokens if token < self._tokens.end]))

    def _prompt_tokens(self, prompt: str) -> list[int]:
        """Return a client's prompt, without special tokens that it may spell."""
        if not prompt.strip():
            return []
        found = self._model.tokenizer.encode(" " + prompt.strip(), add_special_tokens=False)
        return [id for id in found.ids if id < self._tokens.end]

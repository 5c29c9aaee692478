"""Files of several windows: prompts, silence, fallback, cancellation and blocks."""

from __future__ import annotations

import asyncio
import io
import itertools
import math
import wave
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from kvferry.engine.speech.options import TEMPERATURES, SpeechOptions
from kvferry.engine.speech.segments import Segment
from kvferry.engine.speech.track import Track
from kvferry.engine.speech.transcriber import Transcriber
from kvferry.engine.speech.window import Attempt, Decoded, Reading, Window
from kvferry.protocol.errors import StepFailed
from kvferry.speech_worker.assembly import SpeechParts
from tests.engine.speech.conftest import noise
from tests.waiting import wait_for

GREEDY = SpeechOptions(False, "en", "", (0.0,), "json", False, False, True)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def wav(samples: torch.Tensor) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes((samples.clamp(-1, 1) * 32_767).short().numpy().tobytes())
    return out.getvalue()


@dataclass
class Scripted:
    """Loop whose windows say what a test wants: texts by the number of the attempt."""

    texts: list[Decoded]
    attempts: list[Attempt] = field(default_factory=list)
    open: int = 0
    config: Any = None
    languages: list[str] = field(default_factory=list)

    def encode(self, window: Window) -> Future[None]:
        self.open += 1
        window.encoded.set_result(None)
        return window.encoded

    def decode(self, attempt: Attempt) -> Future[Any]:
        self.attempts.append(attempt)
        attempt.done.set_result(self.texts[len(self.attempts) - 1])
        return attempt.done

    def read(self, reading: Reading) -> Future[Any]:
        """Hear the next language; tokens of a text at the end of the window."""
        if reading.heads:
            scores = torch.zeros(1, len(reading.tokens), 50)
            scores[:, :, 40:] = torch.linspace(0, 9, len(reading.tokens))[None, :, None]
            reading.done.set_result(scores)
        else:
            logits = torch.zeros(self.config.vocab_size)
            logits[dict(self.config.tokens.languages)[self.languages.pop(0)]] = 1
            reading.done.set_result(logits)
        return reading.done

    def release(self, window: Window) -> None:
        self.open -= 1


def transcribed(
    parts: SpeechParts, threads: ThreadPoolExecutor, samples: torch.Tensor, loop: Any, options: SpeechOptions = GREEDY
) -> tuple[Transcriber, list[Segment]]:
    async def run() -> tuple[Transcriber, list[Segment]]:
        if isinstance(loop, Scripted):
            loop.config = parts.model.config
        track = Track(wav(samples), 60, threads)
        made = Transcriber(replace(parts.model, loop=loop), track, options)
        found = [segment async for segment in made.segments()]
        assert track.duration == pytest.approx(len(samples) / 16_000)
        await track.close()
        return made, found

    return asyncio.run(run())


def said(
    parts: SpeechParts, text: str, start: float, end: float, logprob: float = -0.2, silence: float = 0.0
) -> Decoded:
    """Return a text between two timestamps; a pair of the last one lets the next window begin there."""
    zero = parts.model.config.tokens.timestamps
    ids = parts.model.tokenizer.encode(text, add_special_tokens=False).ids
    last = zero + round(end / 0.02)
    return Decoded((zero + round(start / 0.02), *ids, last, last), logprob, silence)


def test_the_next_window_begins_where_a_text_ends(parts: SpeechParts, threads: ThreadPoolExecutor) -> None:
    loop = Scripted([said(parts, " one", 0, 0.6), said(parts, " two", 0.1, 0.8), said(parts, " x", 0, 0.5)])
    _, found = transcribed(parts, threads, noise(1.9), loop, replace(GREEDY, prompt="zero"))
    assert [(each.text, each.start, each.end) for each in found] == [
        (" one", 0.0, 0.6), (" two", 0.7, 1.4), (" x", 1.4, 1.9),
    ]  # fmt: skip
    assert [each.id for each in found] == [0, 1, 2]
    tokens, decode = parts.model.config.tokens, parts.model.tokenizer.decode
    prompts = [attempt.prompt for attempt in loop.attempts]
    assert all(prompt[0] == tokens.previous for prompt in prompts)
    assert decode([id for id in prompts[0] if id < tokens.end]) == " zero"
    assert decode([id for id in prompts[2] if id < tokens.end]) == " zero one two"
    assert all(attempt.prompt[attempt.start] == tokens.start for attempt in loop.attempts)
    assert max(map(len, prompts)) < parts.model.config.context // 2 + 3
    assert loop.open == 0


def test_windows_are_heard_as_parts_of_their_file(parts: SpeechParts, threads: ThreadPoolExecutor) -> None:
    samples, heard = noise(1.9), list[torch.Tensor]()
    samples[10] = 0.99  # the file's peak, which only its begin shows
    whole, _ = parts.model.log_mel((samples.clamp(-1, 1) * 32_767).short() / 32_768)

    def log_mel(*given: Any) -> Any:
        heard.append(parts.model.log_mel(*given)[0])
        return parts.model.log_mel(*given)

    model = replace(parts, model=replace(parts.model, log_mel=log_mel))  # type: ignore[arg-type]
    texts = [said(parts, " one", 0, 0.6), said(parts, " two", 0.1, 0.8), said(parts, " x", 0, 0.5)]
    transcribed(model, threads, samples, Scripted(texts))
    assert len(heard) == 3
    for seek, mel in zip((0, 60, 140), heard, strict=True):
        count = min(100, 188 - seek)  # the last frames reach beyond the file
        torch.testing.assert_close(mel[:, :count], whole[:, seek : seek + count], atol=1e-4, rtol=0)


def test_a_text_that_looks_wrong_is_drawn_again(parts: SpeechParts, threads: ThreadPoolExecutor) -> None:
    loop = Scripted([said(parts, " la la la la la la la la la la la la la la la la", 0, 1, -0.1),
                     said(parts, " unsure", 0, 1, -1.5), said(parts, " good", 0, 1)])  # fmt: skip
    made, found = transcribed(parts, threads, noise(1.0), loop, replace(GREEDY, temperatures=TEMPERATURES))
    assert [(each.text, each.temperature) for each in found] == [(" good", 0.4)]
    assert [attempt.temperature for attempt in loop.attempts] == [0.0, 0.2, 0.4]
    assert made.fallbacks == 2


def test_a_hot_text_is_no_prompt(parts: SpeechParts, threads: ThreadPoolExecutor) -> None:
    loop = Scripted([said(parts, " hot", 0, 1), said(parts, " next", 0, 0.9)])
    transcribed(parts, threads, noise(1.9), loop, replace(GREEDY, temperatures=(0.8,)))
    assert parts.model.config.tokens.previous not in loop.attempts[1].prompt


def test_a_window_in_which_nobody_speaks_is_dropped(parts: SpeechParts, threads: ThreadPoolExecutor) -> None:
    loop = Scripted([said(parts, " thanks", 0, 1, -1.2, silence=0.9), said(parts, " words", 0, 0.9, silence=0.9)])
    _, found = transcribed(parts, threads, noise(1.9), loop, replace(GREEDY, temperatures=TEMPERATURES))
    assert [each.text for each in found] == [" words"]
    assert len(loop.attempts) == 2, "silence is not drawn again"


def test_digital_silence_asks_no_model(parts: SpeechParts, threads: ThreadPoolExecutor) -> None:
    loop = Scripted([said(parts, " late", 0, 0.98), said(parts, " words", 0, 0.98)])
    samples = torch.zeros(16_000 * 6)
    samples[40_000:54_400] = noise(0.9)
    made, found = transcribed(parts, threads, samples, loop)
    assert [(each.text, each.start) for each in found] == [(" late", 1.6), (" words", 2.58)]
    assert made.windows == 2
    assert made.skipped / 100 == pytest.approx(1.6 + 6 - 3.56)


def test_times_end_with_the_audio(parts: SpeechParts, threads: ThreadPoolExecutor) -> None:
    loop = Scripted([said(parts, " one", 0, 0.6), said(parts, " two", 0.2, 0.9)])
    _, found = transcribed(parts, threads, noise(1.1), loop)
    assert [(each.text, each.start, each.end) for each in found] == [(" one", 0.0, 0.6), (" two", 0.8, 1.1)]


def test_a_rest_of_a_few_frames_is_not_heard(parts: SpeechParts, threads: ThreadPoolExecutor) -> None:
    loop = Scripted([said(parts, " one", 0, 0.96)])
    transcribed(parts, threads, noise(1.03), loop)
    assert len(loop.attempts) == 1


def test_a_window_in_which_nobody_speaks_tells_no_language(parts: SpeechParts, threads: ThreadPoolExecutor) -> None:
    loop = Scripted([said(parts, " x", 0, 1, -1.2, silence=0.9), said(parts, " a", 0, 0.9)], languages=["de", "en"])
    made, _ = transcribed(parts, threads, noise(1.9), loop, replace(GREEDY, language=""))
    assert made.language == "en"
    assert dict(parts.model.config.tokens.languages)["en"] in loop.attempts[1].prompt


def test_words_are_in_order_where_windows_overlap(parts: SpeechParts, threads: ThreadPoolExecutor) -> None:
    """Attention may put a window's last word behind the begin of the next window."""
    loop = Scripted([said(parts, " one two", 0, 0.4), said(parts, " six", 0, 0.9)])
    _, found = transcribed(parts, threads, noise(1.3), loop, replace(GREEDY, words=True))
    bounds = [(word.start, word.end) for each in found for word in each.words]
    assert all(start <= end for start, end in bounds)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(bounds)), bounds


def test_words_of_a_translation_are_english_ones(
    parts: SpeechParts, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have spaces between them, whatever language is spoken."""
    monkeypatch.setattr("kvferry.engine.speech.words.UNSPACED", frozenset(["de"]))
    options, texts = replace(GREEDY, language="de", words=True), [said(parts, " good day", 0, 0.96)]
    for translate, count in ((False, len("goodday")), (True, 2)):
        _, found = transcribed(parts, threads, noise(1.0), Scripted(texts), replace(options, translate=translate))
        assert len(found[0].words) == count


def test_windows_of_files_that_left_are_not_kept(parts: SpeechParts) -> None:
    """While all blocks are taken and another file's window waits before them."""
    loop, held = parts.model.loop, [Window(parts.model.log_mel(noise(1.0))[0]) for _ in range(5)]
    for encoded in [loop.encode(window) for window in held][:4]:
        encoded.result(60)
    gone = [Window(parts.model.log_mel(noise(1.0))[0]) for _ in range(8)]
    spectrograms = [weakref.ref(window.mel) for window in gone if window.mel is not None]
    for window in gone:
        loop.encode(window)
        loop.release(window)
    del gone, window
    wait_for(lambda: not any(each() is not None for each in spectrograms))
    for window in held:
        loop.release(window)
    wait_for(lambda: loop.free_blocks == loop.blocks)


def test_several_files_and_one_that_leaves(parts: SpeechParts, threads: ThreadPoolExecutor) -> None:
    """Eight files share four windows' blocks; a cancelled one returns its blocks at once."""
    loop = parts.model.loop

    async def one(seed: int) -> list[tuple[str, float]]:
        track = Track(wav(noise(2.5, seed)), 60, threads)
        made = Transcriber(parts.model, track, replace(GREEDY, language="", temperatures=TEMPERATURES, words=True))
        return [(each.text, each.end) async for each in made.segments()]

    async def together() -> list[Any]:
        tasks = [asyncio.create_task(one(seed % 4)) for seed in range(9)]
        while loop.free_blocks == loop.blocks:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        tasks.pop().cancel()
        return await asyncio.gather(*tasks)

    found = asyncio.run(together())
    assert found[:4] == found[4:], "the same file is written down in the same way, whatever runs beside it"
    wait_for(lambda: loop.free_blocks == loop.blocks)


def test_a_step_that_fails_ends_its_own_file_alone(parts: SpeechParts, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, batch = parts.model.loop, parts.model.loop.batch
    windows = [Window(parts.model.log_mel(noise(1.0, seed))[0]) for seed in range(2)]
    for future in [loop.encode(window) for window in windows]:
        future.result(60)
    real = batch.step

    def step(attempts: list[Attempt]) -> list[Attempt]:
        if any(attempt.window is windows[1] for attempt in attempts):
            raise RuntimeError("numbers went wrong")
        return real(attempts)

    monkeypatch.setattr(batch, "step", step)
    tokens = parts.model.config.tokens
    prompt = [tokens.start, dict(tokens.languages)["en"], tokens.transcribe]
    futures = [loop.decode(Attempt(window, prompt, 0, 0.0, 0, 20)) for window in windows]
    assert futures[0].result(60).tokens
    with pytest.raises(StepFailed, match="numbers went wrong"):
        futures[1].result(60)
    for window in windows:
        loop.release(window)
    wait_for(lambda: loop.free_blocks == loop.blocks)


def test_numbers_that_are_not_finite_end_their_file(parts: SpeechParts) -> None:
    window = Window(torch.full((80, 100), math.nan))
    parts.model.loop.encode(window).result(60)
    with pytest.raises(StepFailed, match="not finite"):
        parts.model.loop.decode(Attempt(window, [parts.model.config.tokens.start], 0, 0.0, 0, 5)).result(60)
    parts.model.loop.release(window)

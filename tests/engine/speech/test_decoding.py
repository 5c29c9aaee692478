"""Windows are decoded as transformers decodes them, alone or together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.engine.speech import encoder
from kvferry.engine.speech.decoder import Row
from kvferry.engine.speech.window import Attempt, Decoded, Reading, Window
from kvferry.kernels.cpu import instruction_set
from kvferry.kernels.cpu.full_attention import full_attention
from kvferry.protocol.settings import WorkerSettings
from kvferry.speech_worker.assembly import SpeechParts, assemble_speech
from tests.engine.speech.conftest import noise
from tests.engine.speech.tiny_whisper import make_tiny_whisper
from tests.engine.speech.transformers_rules import processed


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Any:
    from transformers import WhisperForConditionalGeneration

    return WhisperForConditionalGeneration.from_pretrained(tiny).eval()


def mel_of(parts: SpeechParts, seed: int) -> torch.Tensor:
    return parts.model.log_mel(noise(1.0, seed) * torch.linspace(0.05, 1, 16_000))[0]


def decode(parts: SpeechParts, mels: list[torch.Tensor], prompt: list[int], temperature: float = 0.0) -> list[Decoded]:
    """Decode windows together."""
    loop, windows = parts.model.loop, [Window(mel) for mel in mels]
    try:
        for future in [loop.encode(window) for window in windows]:
            future.result(60)
        attempts = [Attempt(window, prompt, 0, temperature, seed=7, limit=32) for window in windows]
        return [future.result(60) for future in [loop.decode(attempt) for attempt in attempts]]
    finally:
        for window in windows:
            loop.release(window)


def beginning(parts: SpeechParts, language: str = "en") -> list[int]:
    tokens = parts.model.config.tokens
    return [tokens.start, dict(tokens.languages)[language], tokens.transcribe]


@torch.inference_mode()
def test_the_encoder_is_that_of_transformers(parts: SpeechParts, reference: Any) -> None:
    mel = mel_of(parts, 1)
    *waits, found = parts.model.loop.encoder.steps(mel)
    assert waits == [None] * 3, "decode steps run between its layers"
    expected = reference.model.encoder(mel[None]).last_hidden_state[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(instruction_set() is None, reason="the package was installed without a C++ compiler")
@torch.inference_mode()
def test_the_encoder_attends_on_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, with heads of 32: as near to float32 as PyTorch's attention is."""
    path, calls = make_tiny_whisper(tmp_path / "tiny", encoder_heads=2), list[int]()
    monkeypatch.setattr(encoder, "full_attention", lambda *given: calls.append(1) or full_attention(*given))
    steps = {}
    for dtype in ("float32", "bfloat16"):
        made = assemble_speech(WorkerSettings(model=str(path), dtype=dtype, device="cpu"))
        steps[dtype] = made.model.loop.encoder.steps
    mel = mel_of(made, 1)
    wanted = list(steps["float32"](mel))[-1]
    assert not calls, "float32 has PyTorch's attention"
    found = list(steps["bfloat16"](mel))[-1].float()
    assert len(calls) == made.model.config.encoder_layers
    monkeypatch.setattr(encoder, "fits", lambda *_: False)
    plain = list(steps["bfloat16"](mel))[-1].float()
    assert (found - wanted).norm() < 1.5 * (plain - wanted).norm() + 1e-6


@pytest.mark.parametrize("language", ["en", "de"])
@torch.inference_mode()
def test_greedy_tokens_are_those_of_transformers(parts: SpeechParts, reference: Any, language: str) -> None:
    """A window's; `generate` would go on with the next one."""
    mels, prompt, config = [mel_of(parts, seed) for seed in range(3)], beginning(parts, language), parts.model.config
    found = decode(parts, mels, prompt)
    for mel, ours in zip(mels, found, strict=True):
        written: list[int] = []
        for _ in range(32):
            ids = torch.tensor([[*prompt, *written]])
            logits = reference(mel[None], decoder_input_ids=ids).logits[:, -1].float()
            token = int(processed(config, written, logits).argmax())
            if token == config.tokens.end:
                break
            written.append(token)
        assert list(ours.tokens) == written
        assert len(set(written)) > 5
    assert len({ours.tokens for ours in found}) == 3, "the audio matters"


@torch.inference_mode()
def test_the_language_is_that_which_transformers_detects(parts: SpeechParts, reference: Any) -> None:
    tokens = parts.model.config.tokens
    for seed in range(3):
        mel = mel_of(parts, seed)
        window = Window(mel)
        parts.model.loop.encode(window).result(60)
        logits = parts.model.loop.read(Reading(window, [tokens.start], heads=False)).result(60)
        parts.model.loop.release(window)
        expected = reference(mel[None], decoder_input_ids=torch.tensor([[tokens.start]])).logits[0, -1]
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


@torch.inference_mode()
def test_alignment_heads_see_what_those_of_transformers_see(parts: SpeechParts, reference: Any) -> None:
    mel, ids = mel_of(parts, 2), [*beginning(parts), 40, 41, 42]
    window = Window(mel)
    parts.model.loop.encode(window).result(60)
    scores = parts.model.loop.read(Reading(window, ids, heads=True)).result(60)
    parts.model.loop.release(window)
    reference.set_attn_implementation("eager")
    attended = reference(mel[None], decoder_input_ids=torch.tensor([ids]), output_attentions=True).cross_attentions
    expected = torch.stack([attended[layer][0, head] for layer, head in parts.model.config.alignment_heads])
    torch.testing.assert_close(scores.softmax(-1), expected, atol=1e-4, rtol=1e-3)


def test_a_window_is_decoded_the_same_among_others(parts: SpeechParts) -> None:
    """At a temperature, too: noise is a function of seed and position."""
    mels = [mel_of(parts, seed) for seed in range(4)]
    for temperature in (0.0, 0.8):
        together = decode(parts, mels, beginning(parts), temperature)
        for mel, among in zip(mels, together, strict=True):
            (alone,) = decode(parts, [mel], beginning(parts), temperature)
            assert alone.tokens == among.tokens
            assert alone.avg_logprob == pytest.approx(among.avg_logprob, abs=1e-5)


@torch.inference_mode()
def test_bits_do_not_depend_on_neighbours_in_compiled_kernels(tiny: Path) -> None:
    """In bfloat16, whose dense layers of the compiled kernels compute a row as if it were alone."""
    made = assemble_speech(WorkerSettings(model=str(tiny), dtype="bfloat16", device="cpu", max_num_seqs=4))
    if made.model.loop.decoder._ops.name != "cpu":
        pytest.skip("the compiled kernels are not installed")
    decoder, size = made.model.loop.decoder, made.model.loop.blocks // 4
    windows = [range(each * size, (each + 1) * size) for each in range(4)]
    for seed, blocks in enumerate(windows):
        *_, output = made.model.loop.encoder.steps(mel_of(made, seed))
        decoder.store(output, list(blocks[4:]))
    rows = [Row(30 + at, at, list(blocks[:4]), list(blocks[4:])) for blocks in windows for at in range(5)]
    together = decoder.logits(decoder.hidden(rows))
    for each in range(4):
        alone = decoder.logits(decoder.hidden(rows[5 * each : 5 * each + 5]))
        assert torch.equal(alone, together[5 * each : 5 * each + 5])

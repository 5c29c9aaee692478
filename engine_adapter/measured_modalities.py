"""Measures, when an adapter joins, which media its engine reads, and whether it transcribes.

A modality counts if the engine makes a prompt of it, and generates from that prompt the tokens that its own chat
endpoint answers with. So an engine whose token interface loses a part of an image takes no images."""

from __future__ import annotations

import base64
import json
import logging
import struct
import time
import zlib
from typing import Any

from kvferry.engine_adapter.engine import Engine, EngineCall, EngineDelta
from kvferry.engine_adapter.measurable_media import MeasurableMedia
from kvferry.protocol.errors import InvalidRequest, Overloaded, StepFailed
from kvferry.protocol.media import MODALITIES, TRANSCRIPTION, RenderRequest
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.speech import SpeechRequest

log = logging.getLogger("kvferry.adapter")

SIDE, FRAMES = 64, 4
"""Width and height of the images in pixels, and images of the video."""
RATE, SECONDS = 16_000, 1
"""Samples per second of the audio, and its length."""
TOKENS = 8
"""Number of tokens compared."""


async def measured_modalities(engine: Engine) -> tuple[str, ...]:
    """Return the modalities of `protocol.media.MODALITIES` that the engine reads, and TRANSCRIPTION if it transcribes.

    Raises NodeDown and NodeLost as the engine does."""
    if engine.media is None:
        return ()
    kept = [modality for modality in MODALITIES if await _reads(engine, engine.media, modality)]
    if await _transcribes(engine.media):
        kept.append(TRANSCRIPTION)
    log.info("measured: prompts may hold %s", ", ".join(kept) or "only text")
    return tuple(kept)


async def _reads(engine: Engine, media: MeasurableMedia, modality: str) -> bool:
    chat = json.dumps({"messages": [{"role": "user", "content": [_text(), probe(modality)]}]}).encode()
    salt, given = f"measured-{modality}-{time.time_ns()}", list[int]()
    try:
        prompt = await media.render(RenderRequest(chat))
        if [item.modality for item in prompt.media] != [modality] or not prompt.sound:
            return False
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        call = EngineCall(salt, prompt.token_ids, params, cache_salt=salt, media=prompt.media)

        def deliver(delta: EngineDelta) -> None:
            given.extend(delta.token_ids)

        await engine.generate(call, deliver)
        due = await media.answer(chat, TOKENS, f"{salt}-chat")
    except (InvalidRequest, StepFailed, Overloaded) as error:
        log.info("the engine takes no %s: %s", modality, error.message)
        return False
    if tuple(given) != due:
        log.warning("prompts may hold no %s: the engine's token interface answers differently from its chat", modality)
    return tuple(given) == due


async def _transcribes(media: MeasurableMedia) -> bool:
    """Return whether the engine transcribes a tone, whatever the text."""
    request, transcript = SpeechRequest(False, (("response_format", "json"),), "tone.wav", _wav()), bytearray()
    try:
        await media.transcribe(request, lambda content_type: None, transcript.extend)
    except (InvalidRequest, StepFailed, Overloaded) as error:
        log.info("the engine transcribes nothing: %s", error.message)
        return False
    return bool(transcript)


def _text() -> dict[str, Any]:
    return {"type": "text", "text": "What is this?"}


def probe(modality: str) -> dict[str, Any]:
    """Return a content part with a small image, audio or video."""
    if modality == "audio":
        url = f"data:audio/wav;base64,{_base64(_wav())}"
    elif modality == "image":
        url = f"data:image/png;base64,{_base64(_png(0))}"
    else:
        url = "data:video/jpeg;base64," + ",".join(_base64(_png(at * 60)) for at in range(FRAMES))
    return {"type": f"{modality}_url", f"{modality}_url": {"url": url}}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _png(shade: int) -> bytes:
    """Return an image whose rows become brighter, from this shade on."""
    rows = b"".join(b"\0" + bytes([(shade + 3 * row) % 256]) * 3 * SIDE for row in range(SIDE))
    head = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts
    )


def _wav() -> bytes:
    """Return a tone that rises and falls by steps."""
    samples = b"".join(struct.pack("<h", 400 * (at % 40) - 8000) for at in range(RATE * SECONDS))
    head = struct.pack("<HHIIHH", 1, 1, RATE, 2 * RATE, 2, 16)
    body = b"WAVEfmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", len(samples)) + samples
    return b"RIFF" + struct.pack("<I", len(body)) + body

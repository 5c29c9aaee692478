"""Tiny random checkpoints of families with an audio tower, clips, chats, and transformers' logits of them."""

from __future__ import annotations

import base64
import io
import json
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer

from kvferry.protocol.media import RenderRequest
from tests.engine import tiny_vision
from tests.engine.tiny_models import transformers
from tests.engine.tiny_vision import TEXT, VOCAB, WORDS
from tests.render_requests import render_request

SPECIAL = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>", "[BEGIN_AUDIO]", "[AUDIO]")
IDS = {text: VOCAB + index for index, text in enumerate(SPECIAL)}
RATE, WINDOW_S, BINS = 16_000, 1, 20
"""Samples and seconds of a tower's window, and bins of its spectrograms."""
TOWER = {"num_mel_bins": BINS, "max_source_positions": 50 * WINDOW_S}


@dataclass(frozen=True)
class Family:
    """config: of the model. shown: what its chat template writes for a clip. token: that of its rows."""

    config: Any
    shown: str
    token: str


def qwen2_audio() -> Family:
    tower = TOWER | {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "d_model": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    text = TEXT | heads | {"model_type": "qwen2", "vocab_size": VOCAB + len(SPECIAL)}
    config = transformers.Qwen2AudioConfig(text_config=text, audio_config=tower, audio_token_index=IDS["<|AUDIO|>"])
    return Family(config, "<|audio_bos|><|AUDIO|><|audio_eos|>", "<|AUDIO|>")


def voxtral() -> Family:
    tower = TOWER | {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 160, "hidden_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    text = TEXT | heads | {"model_type": "llama", "vocab_size": VOCAB + len(SPECIAL)}
    config = transformers.VoxtralConfig(text_config=text, audio_config=tower, audio_token_id=IDS["[AUDIO]"])
    return Family(config, "[BEGIN_AUDIO][AUDIO]", "[AUDIO]")


FAMILIES = {"qwen2_audio": qwen2_audio, "voxtral": voxtral}


def tokenizer() -> Tokenizer:
    made = tiny_vision.tokenizer()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return made


def save(name: str, path: Path) -> Any:
    """Write the checkpoint of a family under `path`; return transformers' model of it, in float32."""
    family = FAMILIES[name]()
    torch.manual_seed(7)
    whole = type(family.config).__name__.replace("Config", "ForConditionalGeneration")
    model = getattr(transformers, whole)(family.config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.8 if parameter.ndim == 1 else 0.0, 0.2)
    model.save_pretrained(path)
    tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<eos>"}))
    template = WORDS.replace("part.type == 'image'", "'audio_url' in part").replace("IMAGE", family.shown)
    (path / "chat_template.jinja").write_text(template)
    processor().save_pretrained(path)
    return model.eval()


def processor() -> Any:
    return transformers.WhisperFeatureExtractor(feature_size=BINS, chunk_length=WINDOW_S)


def clip(seconds: float, seed: int = 0) -> np.ndarray:
    """int16 samples of two tones and some noise."""
    made, time = np.random.default_rng(seed), np.arange(round(seconds * RATE)) / RATE
    tones = sum(np.sin(2 * np.pi * made.uniform(200, 3000) * time) for _ in range(2))
    return np.asarray(8000 * tones + made.normal(0, 500, len(time)), np.int16)


def wav(samples: np.ndarray) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    return out.getvalue()


def part(content: str | np.ndarray) -> dict[str, Any]:
    """A content part as clients write it."""
    if isinstance(content, str):
        return {"type": "text", "text": content}
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav(content)).decode(), "format": "wav"}}


def url_part(content: str | np.ndarray | bytes) -> dict[str, Any]:
    """A content part as routers write it."""
    if isinstance(content, str):
        return {"type": "text", "text": content}
    file = content if isinstance(content, bytes) else wav(content)
    return {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{base64.b64encode(file).decode()}"}}


def chat(content: Sequence[str | np.ndarray | bytes]) -> RenderRequest:
    """A question of texts and clips, as routers write it."""
    message = {"role": "user", "content": [url_part(each) for each in content]}
    return render_request([message], add_generation_prompt=True)


def clips_of(content: Sequence[str | np.ndarray]) -> list[np.ndarray]:
    return [each.astype(np.float32) / 32_768 for each in content if not isinstance(each, str)]


@torch.inference_mode()
def oracle(name: str, model: Any, content: Sequence[str | np.ndarray], token_ids: torch.Tensor) -> torch.Tensor:
    """float32 [T, vocabulary] of transformers' whole model."""
    given, own = {}, processor()
    clips = clips_of(content)
    if clips and name == "voxtral":
        given = {"input_features": torch.cat([windows(each) for each in clips])}
    elif clips:
        made = own(clips, sampling_rate=RATE, padding="max_length", return_attention_mask=True, return_tensors="pt")
        given = {"input_features": made["input_features"], "feature_attention_mask": made["attention_mask"]}
    ids = token_ids[None]
    logits: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits[0].float()
    return logits


def windows(samples: np.ndarray) -> torch.Tensor:
    """Spectrograms of a clip's windows, by Voxtral's processor of transformers."""
    from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

    own = type("Extractor", (), {"feature_extractor": processor()})()
    given = {"sampling_rate": RATE, "padding": True, "truncation": False, "pad_to_multiple_of": WINDOW_S * RATE}
    found: torch.Tensor = VoxtralProcessor._retrieve_input_features(
        own, [samples], 100 * WINDOW_S, return_tensors="pt", **given
    )
    return found


def expansion(name: str, samples: np.ndarray) -> str:
    """What the family's processor of transformers writes in place of the template's token for one clip.

    That of Voxtral is in mistral-common: 375 tokens for each half minute that has begun, here 10 for each second."""
    if name == "voxtral":
        return "[AUDIO]" * 10 * -(-len(samples) // (WINDOW_S * RATE))
    from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor

    audio = clips_of([samples])
    made = processor()(audio, sampling_rate=RATE, padding="max_length", return_attention_mask=True)
    frames = int(made["attention_mask"].sum())
    told = {"num_audio_tokens": [(((frames - 1) // 2 + 1) - 2) // 2 + 1]}
    own = type("Texts", (), {"audio_token": "<|AUDIO|>"})()
    return Qwen2AudioProcessor.replace_audio_token(own, told, 0)

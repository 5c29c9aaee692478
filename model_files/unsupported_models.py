"""Rejects, by config and before any weight is read, models that no worker can run."""

from __future__ import annotations

from typing import Any

from kvferry.model_files.gguf import read_gguf
from kvferry.model_files.multimodal import TEXT_SERVED, is_multimodal, text_config
from kvferry.model_files.quantisation import quantisation
from kvferry.model_files.read_errors import naming
from kvferry.model_files.source import ModelSource, read_json, resolve, unweighted
from kvferry.model_files.speech_config import SPEECH
from kvferry.model_files.supported_decoders import LATENT
from kvferry.model_files.supported_encoders import is_encoder
from kvferry.protocol.errors import ConfigError

_LATENT = "its latent attention (MLA) is supported only for DeepSeek V2 and V3 and GLM-4.7-Flash"
_ENCODER = "it is an encoder-decoder; only decoders and Whisper are supported"
_DECODER_HEAD = "it is a decoder with a classification head; such heads are supported only on encoders"
_COMPOSITE = (
    "it is multimodal; supported are Gemma 3, 3n and 4, Idefics 3, LFM2-VL, Llama 4, Mistral 3, Qwen-VL, Qwen2-Audio, "
    "Qwen3.5, SmolVLM and Voxtral"
)
_QUANTISED_ENCODER = "it is a quantized encoder; only decoders can be quantized"


def resolve_runnable(model: str, load_format: str = "auto") -> ModelSource:
    """Resolve the model with weights, but download none if its config already rules it out or load_format is dummy.

    Raises ConfigError."""
    source = resolve(model, weights=False)
    require_runnable(source)
    return unweighted(source) if load_format == "dummy" else resolve(model)


def require_runnable(source: ModelSource) -> None:
    """Raise ConfigError naming the model and the reason, if its config already shows that it cannot run."""
    with naming(source.name):
        kind, reason = _kind_and_reason(source)
    if reason is not None:
        raise ConfigError(f"{source.name} ({kind}) cannot be served: {reason}", param="model")


def _kind_and_reason(source: ModelSource) -> tuple[str, str | None]:
    if source.kind == "gguf":
        file = read_gguf(source.path)
        return file.architecture, _gguf_reason(file.architecture, file.get("attention.kv_lora_rank"))
    config = read_json(source.path / "config.json")
    return str(config.get("model_type", "")), _config_reason(config)


def _config_reason(config: dict[str, Any]) -> str | None:
    if config.get("model_type") == SPEECH:
        return None
    text = text_config(config)
    if config.get("is_encoder_decoder"):
        return _ENCODER
    if _classifies(config) and not is_encoder(config):
        return _DECODER_HEAD
    if text.get("kv_lora_rank") and text.get("model_type") not in LATENT:
        return _LATENT
    if is_multimodal(config) and config.get("model_type") not in TEXT_SERVED:
        return _COMPOSITE
    return _quantised_reason(config)


def _quantised_reason(config: dict[str, Any]) -> str | None:
    try:
        found = quantisation(config)
    except ConfigError as error:
        return error.message
    return _QUANTISED_ENCODER if found is not None and is_encoder(config) else None


def _classifies(config: dict[str, Any]) -> bool:
    return any(str(name).endswith("ForSequenceClassification") for name in config.get("architectures") or ())


def _gguf_reason(architecture: str, latent_rank: int | None) -> str | None:
    if latent_rank and architecture != "deepseek2":
        return _LATENT
    return None

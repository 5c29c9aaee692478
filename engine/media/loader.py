"""Loads a model's media encoder (processor and tower) from the checkpoint of its text model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from kvferry.engine.media.chat import ChatRenderer
from kvferry.engine.media.embedding_rows import EmbeddingRows
from kvferry.engine.media.encoder import MediaEncoder
from kvferry.engine.media.family_encoder import FamilyEncoder
from kvferry.engine.media.gemma3 import Gemma3
from kvferry.engine.media.idefics3 import Idefics3
from kvferry.engine.media.media_family import MediaFamily, Tower
from kvferry.engine.media.mistral3 import Mistral3
from kvferry.engine.media.packed_tower import pack_tower
from kvferry.engine.media.qwen_vl import QwenVL
from kvferry.engine.models.hf import transformers_module
from kvferry.model_files.chat_templates import ChatTemplates, read_chat_templates
from kvferry.model_files.multimodal import is_text, media_taken
from kvferry.model_files.read_errors import naming
from kvferry.model_files.safetensors_headers import safetensors_header
from kvferry.model_files.source import ModelSource, read_json, weight_files
from kvferry.model_files.speech_config import require_decoder
from kvferry.model_files.tokenizer import TextTokenizer, load_tokenizer
from kvferry.protocol.errors import ConfigError, reason

log = logging.getLogger("kvferry.media")

Text = Callable[[int], str]
"""Returns the text of a token."""
Made = Callable[[Tower, Text], MediaFamily]


def _qwen_vl(tower: Tower, text: Text) -> MediaFamily:
    return QwenVL(tower, text(tower.config.image_token_id))


def _qwen2_audio(tower: Tower, text: Text) -> MediaFamily:
    require_decoder()
    from kvferry.engine.media.qwen2_audio import Qwen2Audio  # imports PyAV, which nodes of other models do without

    return Qwen2Audio(tower, text(tower.config.audio_token_id))


def _voxtral(tower: Tower, text: Text) -> MediaFamily:
    require_decoder()
    from kvferry.engine.media.voxtral import Voxtral  # imports PyAV, too

    return Voxtral(tower, text(tower.config.audio_token_id))


_FAMILIES: dict[str, Made] = {
    "gemma3": lambda tower, text: Gemma3(
        tower, *(text(getattr(tower.config, f"{name}_token_index")) for name in ("image", "boi", "eoi"))
    ),
    "idefics3": lambda tower, text: Idefics3(tower, text(tower.config.image_token_id)),
    "mistral3": lambda tower, text: Mistral3(tower, text(tower.config.image_token_index)),
    "qwen2_audio": _qwen2_audio,
    "smolvlm": lambda tower, text: Idefics3(tower, text(tower.config.image_token_id)),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"), _qwen_vl),
    "voxtral": _voxtral,
}
"""Families by model_type, those of `MEDIA_SERVED`."""
_FLOATS = ("F32", "F16", "BF16")
_TOWERS = {"image": "vision", "audio": "audio"}
"""Words for towers by modality."""


def load_media_encoder(source: ModelSource, *, dtype: torch.dtype, device: torch.device) -> MediaEncoder | None:
    """Return the encoder of a model's media in the dtype of its text; None for a model whose text alone is served.

    A model without a chat template, such as a base model, also gives None. Raises ConfigError for any exception,
    naming the missing or unsupported part."""
    if source.kind == "gguf":
        return None
    config = read_json(source.path / "config.json")
    if (modality := media_taken(config)) is None:
        return None
    templates = read_chat_templates(source)
    if templates.chat is None:
        log.warning("%s has no chat template, so it takes no images or audio", source.name)
        return None
    with naming(source.name):
        try:
            return _load(source, modality, _FAMILIES[config["model_type"]], templates, dtype, device)
        except ConfigError:
            raise
        except Exception as error:
            log.debug("loading the tower of %s", source.path, exc_info=True)
            message = f"the {_TOWERS[modality]} tower of {source.name} cannot be run: {reason(error)}"
            raise ConfigError(f"{message}; --language-model-only runs its text alone", param="model") from error


def _load(
    source: ModelSource,
    modality: str,
    made: Made,
    templates: ChatTemplates,
    dtype: torch.dtype,
    device: torch.device,
) -> FamilyEncoder:
    tokenizer = load_tokenizer(source)
    tower = _tower(source, modality, dtype, device)
    family = made(tower, lambda token_id: _text(tokenizer, token_id))
    chats = ChatRenderer(templates, family.placeholder)
    embeddings = EmbeddingRows(source.path, device, dtype) if family.mixed else None
    return FamilyEncoder(family, chats, tokenizer, tower.config.text_config.hidden_size, embeddings)


def _text(tokenizer: TextTokenizer, token_id: int) -> str:
    if not (text := tokenizer.token(token_id)):
        raise ConfigError(f"the tokenizer has no token {token_id}, which stands for media", param="model")
    return text


def _tower(source: ModelSource, modality: str, dtype: torch.dtype, device: torch.device) -> Tower:
    """Load the tower that encodes images or audio.

    transformers builds the whole model, but its text has no layers and goes afterwards."""
    _check_floats(source)
    transformers = transformers_module()
    config = transformers.AutoConfig.from_pretrained(source.path, local_files_only=True)
    if modality == "image":
        processor = transformers.AutoImageProcessor.from_pretrained(source.path, backend="pil", local_files_only=True)
    else:
        processor = transformers.AutoFeatureExtractor.from_pretrained(source.path, local_files_only=True)
    text = config.text_config
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = []
    config.quantization_config = None
    module, loaded = transformers.AutoModel.from_pretrained(
        source.path, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
    )
    for problem in ("missing_keys", "mismatched_keys"):
        if found := sorted(map(str, loaded[problem])):
            raise ConfigError(f"the model's files lack the tensor {found[0]}", param="model")
    _without_text(module)
    module = module.to(device).eval().requires_grad_(False)
    pack_tower(module)
    return Tower(module, config, processor)


def _check_floats(source: ModelSource) -> None:
    """Raise ConfigError for a tower whose weights are codes, which transformers would read as numbers."""
    for file in (each for each in weight_files(source.path) if each.suffix == ".safetensors"):
        for name, (kind, _) in safetensors_header(file).items():
            if name.endswith(("weight", "weight_packed")) and kind not in _FLOATS and not is_text(name):
                raise ConfigError(f"{name} is quantised; towers run only in floats", param="model")


def _without_text(module: Any) -> None:
    """Free the embedding, which the text model has for itself."""
    for name in ("language_model", "text_model"):
        if hasattr(module, name):
            setattr(module, name, None)

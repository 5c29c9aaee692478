"""Writes the GGUF files of the picture benchmark's vision model: its text, and its tower with the connector."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.recurrent_models import add_tokens
from kvferry.model_files.gguf import read_gguf

if TYPE_CHECKING:
    import gguf
    import torch

_SUFFIXES = (".weight", ".bias")
_TOWER = ("model.vision_model.", "model.connector.")


def write_text(
    path: Path, weights: Mapping[str, torch.Tensor], config: Any, demo: Path, special: Iterable[str], template: str
) -> None:
    """Write the decoder with the demo model's tokens followed by `special` ones."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    add_tokens(writer, read_gguf(demo), special, gguf.TokenType.CONTROL)
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, value in weights.items():
        if not name.startswith(_TOWER):
            count = next((count for part, count in heads.items() if part in name), 0)
            own = name.replace("text_model.", "")
            _add(writer, names.get_name(own, _SUFFIXES), _interleaved(value, count) if count else value)
    _finish(writer)


def write_tower(path: Path, weights: Mapping[str, torch.Tensor], config: Any, processor: Any) -> None:
    """Write the tower and its connector. llama.cpp always adds the whole picture to its tiles, if it is one, too."""
    import gguf

    vision = config.vision_config
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(gguf.VisionProjectorType.IDEFICS3)
    writer.add_vision_projection_dim(config.text_config.hidden_size)
    writer.add_vision_image_size(vision.image_size)
    writer.add_vision_preproc_image_size(processor.size["longest_edge"])
    writer.add_vision_patch_size(vision.patch_size)
    writer.add_vision_embedding_length(vision.hidden_size)
    writer.add_vision_feed_forward_length(vision.intermediate_size)
    writer.add_vision_block_count(vision.num_hidden_layers)
    writer.add_vision_head_count(vision.num_attention_heads)
    writer.add_vision_attention_layernorm_eps(vision.layer_norm_eps)
    writer.add_vision_projector_scale_factor(config.scale_factor)
    writer.add_vision_use_gelu(True)
    writer.add_vision_image_mean(processor.image_mean)
    writer.add_vision_image_std(processor.image_std)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision.num_hidden_layers)
    for name, value in weights.items():
        if name.startswith(_TOWER):
            _add(writer, names.get_name(name, _SUFFIXES), value, plain=".embeddings." in name)
    _finish(writer)


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows in the order of llama.cpp's rotary embedding, which pairs neighbours."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _add(writer: gguf.GGUFWriter, name: str | None, value: torch.Tensor, *, plain: bool = False) -> None:
    import gguf

    assert name is not None, "the map of names has every tensor"
    numbers = value.float().numpy()
    if plain or numbers.ndim == 1:
        writer.add_tensor(name, numbers)
        return
    kind = gguf.GGMLQuantizationType.BF16
    writer.add_tensor(name, gguf.quantize(numbers, kind), raw_dtype=kind)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

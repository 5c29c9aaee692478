"""The text of multimodal checkpoints on our own decoder, against transformers' whole models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.engine.models import load_model
from kvferry.engine.models.decoder import Decoder
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.memory_needs import model_needs
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError
from tests.engine.tiny_models import EXPERTS, LLAMA4, SHAPE, chunked_logits, tokens_for, transformers

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")

VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
PATCHES = {"image_size": 28, "patch_size": 14}
BLOCKS = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
MROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 3, 3]}
TEXT = SHAPE | {"head_dim": 16, "pad_token_id": 0}


def gemma3() -> torch.nn.Module:
    images = {"image_token_index": 96, "boi_token_index": 95, "eoi_token_index": 94, "mm_tokens_per_image": 4}
    text = TEXT | {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    config = transformers.Gemma3Config(text_config=text, vision_config=VISION | PATCHES, **images)
    return transformers.Gemma3ForConditionalGeneration(config)


def mistral3() -> torch.nn.Module:
    text = TEXT | {"model_type": "mistral", "sliding_window": None}
    vision = VISION | PATCHES | {"model_type": "pixtral", "head_dim": 16}
    config = transformers.Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=96, tie_word_embeddings=False
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def qwen2_vl() -> torch.nn.Module:
    vision = {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64}
    config = transformers.Qwen2VLConfig(text_config=SHAPE | {"rope_parameters": MROPE}, vision_config=vision)
    return transformers.Qwen2VLForConditionalGeneration(config)


def qwen2_5_vl() -> torch.nn.Module:
    config = transformers.Qwen2_5_VLConfig(text_config=SHAPE | {"rope_parameters": MROPE}, vision_config=BLOCKS)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl() -> torch.nn.Module:
    text = SHAPE | {"head_dim": 16, "rope_parameters": MROPE | {"mrope_interleaved": True}}
    vision = BLOCKS | {"deepstack_visual_indexes": [0]}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision)
    return transformers.Qwen3VLForConditionalGeneration(config)


def qwen3_vl_moe() -> torch.nn.Module:
    text = SHAPE | {"head_dim": 16, "rope_parameters": MROPE | {"mrope_interleaved": True}}
    text |= EXPERTS | {"moe_intermediate_size": 48}
    vision = BLOCKS | {"deepstack_visual_indexes": [0]}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


def llama4() -> torch.nn.Module:
    vision = VISION | PATCHES | {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64}
    config = transformers.Llama4Config(text_config=SHAPE | LLAMA4, vision_config=vision)
    return transformers.Llama4ForConditionalGeneration(config)


MODELS = {make.__name__: make for make in (gemma3, mistral3, qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, llama4)}


def saved(name: str, path: Path) -> torch.nn.Module:
    torch.manual_seed(7)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.8 if parameter.ndim == 1 else 0.0, 0.2)
    model.save_pretrained(path)  # type: ignore[operator]
    return model.eval()


def load(path: Path, **how: str) -> Decoder:
    model = load_model(resolve(str(path)), device=CPU, dtype=torch.float32, ops=ReferenceOps(), **how)  # type: ignore[arg-type]
    assert isinstance(model, Decoder)
    return model


def words(length: int = 40) -> torch.Tensor:
    """Tokens of text: the last ones of the vocabulary stand for images."""
    return tokens_for(length) % 90


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_whole_models(name: str, tmp_path: Path) -> None:
    whole, model = saved(name, tmp_path), load(tmp_path)
    with torch.inference_mode():
        text = whole.language_model if name == "llama4" else whole  # transformers' whole model fails without an image
        wanted = text(input_ids=words()[None]).logits[0]  # type: ignore[operator]
    assert wanted.std() > 0.1
    for chunks in ([40], [17, 13, *[1] * 10]):
        torch.testing.assert_close(chunked_logits(model, words(), chunks), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_what_a_node_needs_is_the_texts(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    model = load(tmp_path)
    matrices = [linear.weight.numel() for linear in model.dense_layers()]  # type: ignore[attr-defined]
    needs = model_needs(resolve(str(tmp_path)))
    assert needs.dense.weights == sum(matrices[:-1])
    assert needs.embedding.weights == matrices[-1]


def test_settings_of_the_text_beside_those_of_vision(tmp_path: Path) -> None:
    """As the hub's Qwen2.5-VL has them, with its name of the rotation."""
    saved("qwen2_5_vl", tmp_path)
    wanted = chunked_logits(load(tmp_path), words(), [40])
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(text | config))
    assert torch.equal(chunked_logits(load(tmp_path), words(), [40]), wanted)


def test_tensors_under_either_name_of_the_text(tmp_path: Path) -> None:
    saved("mistral3", tmp_path)
    wanted = chunked_logits(load(tmp_path), words(), [40])
    file = tmp_path / "model.safetensors"
    renamed = {
        name.replace("language_model.model.", "model.language_model.").replace(
            "language_model.lm_head", "lm_head"
        ): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(renamed, file)
    assert torch.equal(chunked_logits(load(tmp_path), words(), [40]), wanted)


def test_what_gemma_3_leaves_out_of_its_config(tmp_path: Path) -> None:
    saved("gemma3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"):
        del config["text_config"][name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"embed_tokens.weight has shape \(97, 64\), the config says \(262208, 64\)"):
        load(tmp_path)


def test_transformers_is_no_way_to_run_it(tmp_path: Path) -> None:
    saved("mistral3", tmp_path)
    with pytest.raises(ConfigError, match="runs only on kvferry's own decoder"):
        load(tmp_path, impl="transformers")

"""A random vision model of SmolVLM 256M's shape, as a checkpoint of transformers and as two GGUF files.

The tower is SigLIP's (768 wide, 12 layers, 512 x 512 pixels in patches of 16), the text that of SmolLM2 135M (576 wide,
30 layers). The demo model lends its tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.picture_gguf import write_text, write_tower
from kvferry.model_files.source import DEMO_MODEL, resolve
from kvferry.model_files.tokenizer import load_tokenizer

TILE = 512
"""Pixels of a tile's side."""
TILE_TOKENS = 64
"""Image tokens of a tile."""
GRID = range(1, 7)
"""Rows and columns that have tokens of their own."""
IMAGE, AROUND, WHOLE, END = "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"
SPECIAL = (AROUND, IMAGE, END, WHOLE, *(f"<row_{row}_col_{column}>" for row in GRID for column in GRID))
"""Tokens after those of the demo model."""
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}:{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %} {{ part['text'] }}{% else %}{{ IMAGE }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""Chat template. IMAGE stands for what each engine replaces by an image."""
TEXT = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": TILE,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
}
SCALE = 4
"""Patches of a side that become one token."""


@dataclass(frozen=True, slots=True)
class VisionModel:
    """Files of one model: its checkpoint, and its text and its tower as GGUF files."""

    checkpoint: Path
    text: Path
    tower: Path


def random_vision_model(folder: Path, edge: int) -> VisionModel:
    """Return the model whose pictures are resized to `edge` pixels, made anew if it is missing."""
    target = folder / f"random-smolvlm-256m-{edge}"
    found = VisionModel(target / "checkpoint", target / "text.BF16.gguf", target / "tower.BF16.gguf")
    if not target.exists():
        unfinished = target.with_suffix(".unfinished")
        unfinished.mkdir(parents=True, exist_ok=True)
        _write(VisionModel(*(unfinished / part.name for part in (found.checkpoint, found.text, found.tower))), edge)
        unfinished.rename(target)
    return found


def _write(files: VisionModel, edge: int) -> None:
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    source = resolve(DEMO_MODEL, weights=False)
    tokens = load_tokenizer(source).library
    tokens.add_special_tokens(list(SPECIAL))
    config = Idefics3Config(
        text_config=TEXT | {"vocab_size": tokens.get_vocab_size(), "pad_token_id": 0},
        vision_config=VISION,
        image_token_id=tokens.token_to_id(IMAGE),
        scale_factor=SCALE,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(files.checkpoint)
    tokens.save(str(files.checkpoint / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": END}
    (files.checkpoint / "tokenizer_config.json").write_text(json.dumps(named))
    (files.checkpoint / "chat_template.jinja").write_text(TEMPLATE.replace("IMAGE", repr(IMAGE)))
    image_processor(edge).save_pretrained(files.checkpoint)
    weights = model.state_dict()
    write_text(files.text, weights, config.text_config, source.path, SPECIAL, TEMPLATE.replace("IMAGE", "part['text']"))
    write_tower(files.tower, weights, config, image_processor(edge))


def image_processor(edge: int) -> Any:
    """Return transformers' processor of pictures, without torchvision."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    own = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return Idefics3ImageProcessorPil(size={"longest_edge": edge}, max_image_size={"longest_edge": TILE}, **own)


def image_tokens(edge: int) -> int:
    """Return the image tokens of a square picture: of its tiles and of the whole picture."""
    tiles = (edge // TILE) ** 2
    return TILE_TOKENS * (tiles + 1 if tiles > 1 else 1)

"""Tiny random checkpoints of families with a vision tower, pictures, chats, and transformers' logits of them."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvferry.protocol.media import RenderRequest
from tests.engine.tiny_hybrids import DELTA, MIXTURE
from tests.engine.tiny_models import EXPERTS, SHAPE, transformers
from tests.render_requests import render_request

SPECIAL = (
    *("<s>", "<eos>", "<image>", "<fake_token_around_image>", "<global-img>", "<start_of_image>", "<end_of_image>"),
    *("<image_soft_token>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
)
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
PAIRS = ("ĊĊ",)
"""Tokens of more than one byte: two ends of lines."""
IDS = {text: index for index, text in enumerate((*BYTES, *PAIRS, *SPECIAL))}
VOCAB = len(IDS)
TEXT = SHAPE | {"vocab_size": VOCAB, "head_dim": 32, "pad_token_id": 0, "max_position_embeddings": 512}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
MROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 7, 5]}
BLOCKS = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 7
}  # fmt: skip
PARTIAL = {
    "rope_parameters": MROPE | {"mrope_interleaved": True, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]}
}
MEAN_STD = {"image_mean": [0.4, 0.5, 0.45], "image_std": [0.25, 0.3, 0.28]}
PIXELS = {"size": {"shortest_edge": 14 * 14, "longest_edge": 14 * 14 * 12}, "patch_size": 7, **MEAN_STD}
WORDS = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Chat template; IMAGE stands for what the family's template writes."""


@dataclass(frozen=True)
class Family:
    """config: of the model. image: what its chat template writes. processor: class and settings of the images'."""

    config: Any
    image: str
    processor: tuple[str, dict[str, Any]]


def idefics3(kind: str) -> Family:
    vision = VISION | {"image_size": 28, "patch_size": 7}
    config = getattr(transformers, f"{kind}Config")(
        text_config=TEXT | {"model_type": "llama"}, vision_config=vision, image_token_id=IDS["<image>"], scale_factor=2,
        pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    sizes = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}, **MEAN_STD}
    return Family(config, "<image>", (f"{kind}ImageProcessorPil", sizes))


def gemma3() -> Family:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3Config(
        text_config=TEXT | {"sliding_window": 9, "layer_types": kinds},
        vision_config=VISION | {"image_size": 56, "patch_size": 14},
        image_token_index=IDS["<image_soft_token>"], boi_token_index=IDS["<start_of_image>"],
        eoi_token_index=IDS["<end_of_image>"], mm_tokens_per_image=16, tie_word_embeddings=True,
    )  # fmt: skip
    sizes = {"size": {"height": 56, "width": 56}, "do_pan_and_scan": None, **MEAN_STD}
    return Family(config, "<start_of_image>", ("Gemma3ImageProcessorPil", sizes))


def mistral3() -> Family:
    config = transformers.Mistral3Config(
        text_config=TEXT | {"model_type": "mistral", "sliding_window": None},
        vision_config=VISION | {"image_size": 56, "patch_size": 7, "model_type": "pixtral", "head_dim": 16},
        image_token_index=IDS["[IMG]"], spatial_merge_size=2, tie_word_embeddings=False,
    )  # fmt: skip
    return Family(config, "[IMG]", ("PixtralImageProcessorPil", {"size": {"longest_edge": 56}, "patch_size": 7}))


def qwen2_5_vl() -> Family:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.Qwen2_5_VLConfig(
        text_config=TEXT | heads | {"rope_parameters": MROPE}, image_token_id=IDS["<|image_pad|>"],
        vision_config=BLOCKS | {"window_size": 28, "fullatt_block_indexes": [1]}, tie_word_embeddings=False,
    )  # fmt: skip
    return Family(config, "<|vision_start|><|image_pad|><|vision_end|>", ("Qwen2VLImageProcessorPil", PIXELS))


def qwen2_vl() -> Family:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    tower = {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "mlp_ratio": 2, "patch_size": 7}
    config = transformers.Qwen2VLConfig(
        text_config=TEXT | heads | {"rope_parameters": MROPE}, image_token_id=IDS["<|image_pad|>"],
        vision_config=tower, tie_word_embeddings=False,
    )  # fmt: skip
    return Family(config, "<|vision_start|><|image_pad|><|vision_end|>", ("Qwen2VLImageProcessorPil", PIXELS))


def qwen3(kind: str, levels: Sequence[int] | None, **text: Any) -> Family:
    """Qwen3-VL, Qwen3.5, and those with experts. levels: layers of the tower whose output is added to the text's."""
    tower = BLOCKS | {"num_position_embeddings": 16} | ({} if levels is None else {"deepstack_visual_indexes": levels})
    config = getattr(transformers, f"{kind}Config")(
        text_config=TEXT | {"rope_parameters": MROPE | {"mrope_interleaved": True}} | text, vision_config=tower,
        image_token_id=IDS["<|image_pad|>"], tie_word_embeddings=False,
    )  # fmt: skip
    return Family(config, "<|vision_start|><|image_pad|><|vision_end|>", ("Qwen2VLImageProcessorPil", PIXELS))


FAMILIES = {
    "idefics3": lambda: idefics3("Idefics3"),
    "smolvlm": lambda: idefics3("SmolVLM"),
    "gemma3": gemma3,
    "mistral3": mistral3,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen2_vl": qwen2_vl,
    "qwen3_vl": lambda: qwen3("Qwen3VL", [0, 1]),
    "qwen3_vl_moe": lambda: qwen3("Qwen3VLMoe", [0, 1], **EXPERTS | {"moe_intermediate_size": 48}),
    "qwen3_5": lambda: qwen3("Qwen3_5", None, **DELTA | PARTIAL),
    "qwen3_5_moe": lambda: qwen3("Qwen3_5Moe", None, **DELTA | PARTIAL | MIXTURE),
}


SPREADS = {"qwen3_5": 0.12, "qwen3_5_moe": 0.12}
"""Standard deviations of weights other than 0.2, with which the delta rule amplifies rounding too much to compare."""


def tokenizer() -> Tokenizer:
    """Each byte is a token, and two ends of lines are one."""
    vocab = {text: IDS[text] for text in (*BYTES, *PAIRS)}
    made = Tokenizer(models.BPE(vocab, [("Ċ", "Ċ")]))
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def save(name: str, path: Path) -> Any:
    """Write the checkpoint of a family under `path`; return transformers' model of it, in float32."""
    family = FAMILIES[name]()
    torch.manual_seed(7)
    model = transformers.AutoModelForImageTextToText.from_config(family.config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.8 if parameter.ndim == 1 else 0.0, SPREADS.get(name, 0.2))
    model.save_pretrained(path)
    tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<eos>"}))
    (path / "chat_template.jinja").write_text(WORDS.replace("IMAGE", "{{ '" + family.image + "' }}"))
    processor(name).save_pretrained(path)
    return model.eval()


def processor(name: str) -> Any:
    kind, settings = FAMILIES[name]().processor
    return getattr(transformers, kind)(**settings)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth picture: noise would be another one at each size."""
    made = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), np.uint8)
    return Image.fromarray(made).resize((width, height), Image.Resampling.BICUBIC)


def url(image: Image.Image, form: str = "PNG", **how: Any) -> str:
    file = BytesIO()
    image.save(file, form, **how)
    return f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def chat(content: Sequence[str | Image.Image], template: str = "") -> RenderRequest:
    """A question of texts and pictures."""
    message = {"role": "user", "content": [part(each) for each in content]}
    return render_request([message], template, add_generation_prompt=True)


def part(content: str | Image.Image) -> dict[str, Any]:
    if isinstance(content, str):
        return {"type": "text", "text": content}
    return {"type": "image_url", "image_url": {"url": url(content)}}


def inputs(name: str, images: Sequence[Image.Image], token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What transformers' model takes for a prompt and its images."""
    own = processor(name)
    if name in ("idefics3", "smolvlm"):
        made = own([list(images)], return_tensors="pt")
    elif name == "mistral3":
        made = own(list(images), patch_size=14, return_tensors="pt")
    else:
        made = own(list(images), return_tensors="pt")
    found = {key: value for key, value in made.items() if key != "num_crops"}
    config = FAMILIES[name]().config
    is_image = token_ids == (config.image_token_index if name in ("gemma3", "mistral3") else config.image_token_id)
    if name == "gemma3":
        found["token_type_ids"] = is_image.long()[None]
    elif name.startswith("qwen"):
        found["mm_token_type_ids"] = is_image.int()[None]
    return found


@torch.inference_mode()
def oracle(name: str, model: Any, images: Sequence[Image.Image], token_ids: torch.Tensor) -> torch.Tensor:
    """float32 [T, vocabulary] of transformers' whole model."""
    found = model(input_ids=token_ids[None], **(inputs(name, images, token_ids) if images else {}))
    logits: torch.Tensor = found.logits[0].float()
    return logits


def expansion(name: str, image: Image.Image) -> str:
    """What the family's processor of transformers writes in place of the template's token for one image.

    That of Mistral 3 cannot be imported without torchvision."""
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

    own = processor(name)
    if name in ("idefics3", "smolvlm"):
        texts = SimpleNamespace(
            fake_image_token="<fake_token_around_image>", global_image_tag="<global-img>", image_token="<image>",
            image_seq_len=4,
        )  # fmt: skip
        made = own([[image]], return_row_col_info=True, return_tensors="pt")
        return Idefics3Processor.replace_image_token(texts, made, 0)
    if name == "gemma3":
        whole = f"\n\n<start_of_image>{'<image_soft_token>' * 16}<end_of_image>\n\n"
        return Gemma3Processor.replace_image_token(SimpleNamespace(full_image_sequence=whole), {"num_crops": [0]}, 0)
    if name == "mistral3":
        ((height, width),) = own([image], patch_size=14, return_tensors="pt")["image_sizes"].tolist()
        row = "[IMG]" * (width // 14)
        return f"{row}[IMG_BREAK]" * (height // 14 - 1) + f"{row}[IMG_END]"
    texts = SimpleNamespace(image_processor=own, image_token="<|image_pad|>")
    return Qwen2_5_VLProcessor.replace_image_token(texts, own([image], return_tensors="pt"), 0)

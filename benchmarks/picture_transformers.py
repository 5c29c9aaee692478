"""Runs transformers' own model as the reference in the picture benchmark (time to first token)."""

from __future__ import annotations

import json
import time
from io import BytesIO
from pathlib import Path

import torch
from PIL import Image


class Transformers:
    """Processor and whole model of a checkpoint in this process."""

    def __init__(self, checkpoint: Path, bfloat16: bool, question: str) -> None:
        from transformers import Idefics3ForConditionalGeneration, PreTrainedTokenizerFast
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
        from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

        dtype = torch.bfloat16 if bfloat16 else torch.float32
        self._model = Idefics3ForConditionalGeneration.from_pretrained(checkpoint, dtype=dtype).eval()
        config, named = self._model.config, json.loads((checkpoint / "tokenizer_config.json").read_text())
        marks = {name: named[name] for name in ("bos_token", "eos_token")}
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"), **marks)
        template = (checkpoint / "chat_template.jinja").read_text()
        side = config.vision_config.image_size // config.vision_config.patch_size // config.scale_factor
        images = Idefics3ImageProcessorPil.from_pretrained(checkpoint)
        self._processor = Idefics3Processor(images, tokenizer, image_seq_len=side**2, chat_template=template)
        self._question = [{"type": "image"}, {"type": "text", "text": question}]

    @torch.inference_mode()
    def ask(self, png: bytes) -> tuple[float, int]:
        """Return the seconds to the first token, from the file on, and the prompt's tokens."""
        began = time.perf_counter()
        image = Image.open(BytesIO(png)).convert("RGB")
        chat = [{"role": "user", "content": self._question}]
        text = self._processor.apply_chat_template(chat, add_generation_prompt=True)
        inputs = self._processor(images=[image], text=[text], return_tensors="pt")
        inputs["pixel_values"] = inputs["pixel_values"].to(self._model.dtype)
        self._model.generate(**inputs, max_new_tokens=1, do_sample=False)
        return time.perf_counter() - began, inputs["input_ids"].shape[1]

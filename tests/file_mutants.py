"""A tiny model in both layouts of files, and mutants of it: one file of it damaged or changed, as a seed says."""

from __future__ import annotations

import json
import random
import shutil
import struct
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers

from kvferry.model_files.gguf_tokenizer import CONTROL, NORMAL, build_tokenizer
from tests.gguf_files import finish, gguf_name
from tests.gguf_mutants import fields_mutated
from tests.hostile_templates import TEMPLATES
from tests.vocabularies import sentencepiece

TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "Ġa", "<s>", "</s>"]
BOS, EOS = len(TOKENS) - 2, len(TOKENS) - 1
HIDDEN, INNER, HEADS, LAYERS = 64, 96, 2, 1
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if loop.index < 9 %}[{{ message['role'] }}]"
    "{{ message['content'] | trim }}{% endif %}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 3, 2**31, 2**32 + 1, 2**63, 10**30, 1e308, -0.5, float("nan"), float("inf"), "", "x", "é" * 9,
    [], [0], [[]], ["a", 1], {}, {"a": 1}, {"type": "BPE"}, "</s>", 64, 4096,
)  # fmt: skip
NUMBERS = (0, 1, 2, 31, 63, 64, 127, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def metadata() -> dict[str, Any]:
    """The tokenizer under GGUF's names."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [NORMAL] * BOS + [CONTROL] * 2,
        "tokenizer.ggml.merges": ["1 2", "Ġ a"],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.chat_template": TEMPLATE,
    }


def tensors(vocab: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    shapes = {"model.embed_tokens": (vocab, HIDDEN), "model.norm": (HIDDEN,), "lm_head": (vocab, HIDDEN)}
    for layer in range(LAYERS):
        parts = {
            "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
            "self_attn.v_proj": (HIDDEN // 2, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return {f"{name}.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()}


def write_directory(path: Path) -> Path:
    """In Hugging Face's layout."""
    path.mkdir(parents=True)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": len(TOKENS), "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 1,
        "head_dim": 32, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 500.0, "hidden_act": "silu",
        "bos_token_id": BOS, "eos_token_id": [EOS], "tie_word_embeddings": False,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.9, "eos_token_id": EOS}))
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(tokens))
    build_tokenizer(metadata()).save(str(path / "tokenizer.json"))
    save_file(
        {name: tensor.bfloat16() for name, tensor in tensors(len(TOKENS)).items()}, str(path / "model.safetensors")
    )
    return path


def write_gguf(path: Path, tokenizer: dict[str, Any]) -> Path:
    """As one file, most of it in Q8_0."""
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in (("block_count", LAYERS), ("context_length", 128), ("embedding_length", HIDDEN)):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500.0)
    for name, value in tokenizer.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_uint32(name, value)
    for name, tensor in tensors(len(tokenizer["tokenizer.ggml.tokens"])).items():
        values = tensor.numpy().astype(np.float32)
        if values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), values)
    finish(writer)
    return path


class Mutants:
    """Under `home`: a directory and two files that are whole, and one mutant at a time."""

    def __init__(self, home: Path) -> None:
        self._home = home
        home.mkdir(parents=True, exist_ok=True)
        self.directory = write_directory(home / "whole")
        self.files = [
            write_gguf(home / f"{name}.gguf", tokenizer)
            for name, tokenizer in (("bytes", metadata()), ("pieces", sentencepiece()))
        ]

    def write(self, seed: int) -> tuple[Path, str]:
        """The model's path, and what was done to which of its files."""
        chance = random.Random(seed)
        shutil.rmtree(self._home / "mutant", ignore_errors=True)
        if chance.random() < 0.4:
            path = self._home / "mutant.gguf"
            whole = chance.choice(self.files)
            if chance.random() < 0.5:
                data, done = fields_mutated(chance, whole)
            else:
                data, done = bytes_mutated(chance, whole.read_bytes(), head=12_000)
            path.write_bytes(data)
            return path, f"gguf: {done}"
        path = self._home / "mutant"
        shutil.copytree(self.directory, path)
        name = chance.choice([file.name for file in sorted(path.iterdir())] + ["chat_template.jinja"])
        file = path / name
        if name == "chat_template.jinja":
            file.write_bytes(_template(chance).encode("utf-8", "surrogatepass"))
            return path, f"{name}: {file.read_bytes()[:80]!r}"
        if name == "model.safetensors" and chance.random() < 0.5:
            done = _safetensors(chance, file)
        elif name.endswith(".json") and chance.random() < 0.75:
            value = json.loads(file.read_text())
            done = "; ".join(json_mutated(chance, value) for _ in range(chance.choice((1, 1, 1, 2, 4))))
            file.write_text(json.dumps(value))
        else:
            data, done = bytes_mutated(chance, file.read_bytes(), head=2_000)
            file.write_bytes(data)
        return path, f"{name}: {done}"


def bytes_mutated(chance: random.Random, data: bytes, head: int) -> tuple[bytes, str]:
    """A few changes, most of them within the first `head` bytes."""
    changed, done = bytearray(data), []
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        place = chance.randrange(max(1, min(head, len(changed)) if chance.random() < 0.9 else len(changed)))
        match chance.randrange(6):
            case 0:
                changed[place : place + 1] = bytes([chance.randrange(256)])
                done.append(f"a byte at {place}")
            case 1 | 2:
                width, number = chance.choice((4, 8)), chance.choice(NUMBERS)
                changed[place : place + width] = struct.pack("<Q", number)[:width]
                done.append(f"{number} in {width} bytes at {place}")
            case 3:
                del changed[place:]
                done.append(f"cut at {place}")
            case 4:
                del changed[place : place + chance.randrange(1, 64)]
                done.append(f"a gap at {place}")
            case _:
                changed[place:place] = chance.randbytes(chance.randrange(1, 64))
                done.append(f"noise at {place}")
    return bytes(changed), ", ".join(done)


def json_mutated(chance: random.Random, value: Any) -> str:
    """One value somewhere within is another, is gone, or lies very deep."""
    place, path = value, []
    while True:
        keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return "nothing"
        key = chance.choice(keys)
        path.append(str(key))
        if isinstance(place[key], dict | list) and place[key] and chance.random() < 0.8:
            place = place[key]
            continue
        odd: Any = deepcopy(chance.choice(ODD))
        if chance.random() < 0.05:
            odd = 0
            for _ in range(400):
                odd = [odd]
        if chance.random() < 0.15:
            del place[key]
            return f"no {'.'.join(path)}"
        place[key] = odd
        return f"{'.'.join(path)} = {str(odd)[:40]}"


def _template(chance: random.Random) -> str:
    if chance.random() < 0.4:
        return chance.choice(TEMPLATES)
    data, _ = bytes_mutated(chance, TEMPLATE.encode(), head=len(TEMPLATE))
    return data.decode("utf-8", "replace")


def _safetensors(chance: random.Random, file: Path) -> str:
    """The header of a file whose length field stays true."""
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    done = json_mutated(chance, header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return f"header: {done}"

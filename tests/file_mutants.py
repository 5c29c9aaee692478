"""A tiny model in both layouts of files, and mutants of it: one file of it damaged or changed, as a seed says."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import xxhash
from safetensors.torch import save_file
from tokenizers import pre_tokenizers

from kvferry.model_files.gguf_tokenizer import CONTROL, NORMAL, build_tokenizer
from tests.file_changes import bytes_mutated, json_mutated
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


@dataclass(frozen=True, slots=True)
class Mutant:
    """A model with one file damaged or changed, on disk until the next one is written.

    done: what was done to which of its files. changed: the name of that file, or empty. files: digests of the files'
    contents by their names."""

    path: Path
    done: str
    changed: str
    files: Mapping[str, str]


class Mutants:
    """Under `home`: a directory and two files that are whole, and one mutant at a time.

    Only the file that a mutant changes is written, and the one that the mutant before it changed."""

    def __init__(self, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.directory = write_directory(home / "whole")
        self.files = [
            write_gguf(home / f"{name}.gguf", tokenizer)
            for name, tokenizer in (("bytes", metadata()), ("pieces", sentencepiece()))
        ]
        self._mutant, self._mutant_file = home / "mutant", home / "mutant.gguf"
        shutil.copytree(self.directory, self._mutant)
        self._whole = {file.name: file.read_bytes() for file in sorted(self.directory.iterdir())}
        self._digests = {name: _digest(data) for name, data in self._whole.items()}
        self._data = {path: path.read_bytes() for path in self.files}
        self._changed = ""

    def whole(self) -> list[Mutant]:
        """The models as they are without a change."""
        files = [Mutant(path, "nothing", "", {path.name: _digest(data)}) for path, data in self._data.items()]
        return [Mutant(self.directory, "nothing", "", self._digests), *files]

    def write(self, seed: int) -> Mutant:
        """Write the mutant of this seed; its place is that of the mutant before it."""
        chance = random.Random(seed)
        if chance.random() < 0.4:
            whole = chance.choice(self.files)
            if chance.random() < 0.5:
                data, done = fields_mutated(chance, whole)
            else:
                data, done = bytes_mutated(chance, self._data[whole], head=12_000)
            self._mutant_file.write_bytes(data)
            name = self._mutant_file.name
            return Mutant(self._mutant_file, f"gguf: {done}", name, {name: _digest(data)})
        name = chance.choice([*self._whole, "chat_template.jinja"])
        data, done = self._mutated(chance, name)
        self._restore()
        (self._mutant / name).write_bytes(data)
        self._changed = name
        return Mutant(self._mutant, f"{name}: {done}", name, {**self._digests, name: _digest(data)})

    def _mutated(self, chance: random.Random, name: str) -> tuple[bytes, str]:
        if name == "chat_template.jinja":
            data = _template(chance).encode("utf-8", "surrogatepass")
            return data, repr(data[:80])
        whole = self._whole[name]
        if name == "model.safetensors" and chance.random() < 0.5:
            return _safetensors(chance, whole)
        if name.endswith(".json") and chance.random() < 0.75:
            value = json.loads(whole)
            done = "; ".join(json_mutated(chance, value) for _ in range(chance.choice((1, 1, 1, 2, 4))))
            return json.dumps(value).encode(), done
        return bytes_mutated(chance, whole, head=2_000)

    def _restore(self) -> None:
        if self._changed in self._whole:
            (self._mutant / self._changed).write_bytes(self._whole[self._changed])
        elif self._changed:
            (self._mutant / self._changed).unlink()


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _template(chance: random.Random) -> str:
    if chance.random() < 0.4:
        return chance.choice(TEMPLATES)
    data, _ = bytes_mutated(chance, TEMPLATE.encode(), head=len(TEMPLATE))
    return data.decode("utf-8", "replace")


def _safetensors(chance: random.Random, data: bytes) -> tuple[bytes, str]:
    """The header of a file whose length field stays true."""
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    done = json_mutated(chance, header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :], f"header: {done}"

"""Tensors of a checkpoint by their Hugging Face names, for every file format."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any, Protocol

import torch

from kvferry.engine.models.dequantise import BLOCKS, CODED, dequantise, stored_bytes
from kvferry.engine.models.mxfp4 import RUN, codes_of_blocks
from kvferry.kernels.decoder_spec import Stored, StoredRows
from kvferry.model_files.gguf import GGUFFile, GGUFTensor
from kvferry.protocol.errors import ConfigError

_GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_GGUF_EXPERTS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
"""Tensors that hold all experts of a layer."""
_GGUF_OWN = {("gpt-oss", "ffn_norm"): "post_attention_norm"}
"""Names that only some architectures use."""
_GGUF_PARAMETERS = {"self_attn.sinks": "attn_sinks.weight", "mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.((.+)\.(weight|bias)|.+)")
_EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.(weight|bias)")
_ROTATED = ("self_attn.q_proj", "self_attn.k_proj")


class Weights(Protocol):
    """Source of a decoder's tensors."""

    def read(self, name: str, out: torch.Tensor) -> None:
        """Write the tensor into `out` (contiguous, any dtype and device).

        Raises ConfigError if it is missing, of another shape, of an unsupported type, or unreadable."""

    def stored(self, name: str, shape: tuple[int, int]) -> Stored | None:
        """Return the tensor as stored, if that is a block format or codes; else None. Raises ConfigError as `read`."""


class PlainWeights:
    """Tensors without block formats. Implements `Weights.stored`."""

    def stored(self, name: str, shape: tuple[int, int]) -> StoredRows | None:
        return None


class GGUFWeights:
    """Implements `Weights` for a GGUF file, dequantising tensors as they are read.

    One buffer holds a tensor's stored bytes.

    permuted_heads: (query heads, K/V heads) of files whose q and k rows are reordered for interleaved rotation, else
    None."""

    def __init__(self, file: GGUFFile, permuted_heads: tuple[int, int] | None):
        self._file = file
        self._permuted = permuted_heads
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def read(self, name: str, out: torch.Tensor) -> None:
        parts = [self._file.tensors.get(part) for part in _parts_of(name)]
        if parts and None not in parts:
            self._join([part for part in parts if part is not None], out)
            return
        tensor = self._find(name, tuple(out.shape))
        dequantise(self._ordered(name, tensor), tensor.type, out)

    def _join(self, parts: list[GGUFTensor], out: torch.Tensor) -> None:
        """Join the parts of a latent's expansion: per head, its keys' [rank, dims] and its values' [dims, rank]."""
        keys, values = (torch.empty(part.shape) for part in parts)
        for part, read in zip(parts, (keys, values), strict=True):
            dequantise(self.bytes_of(part), part.type, read)
        made = torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)
        check_shape(parts[0].name, tuple(made.shape), tuple(out.shape))
        out.copy_(made)

    def stored(self, name: str, shape: tuple[int, int]) -> Stored | None:
        tensor = self._find(name, shape)
        if tensor.type in CODED:
            return codes_of_blocks(self._ordered(name, tensor).view(shape[0], -1, stored_bytes(tensor.type, RUN)))
        if tensor.type not in BLOCKS:
            return None
        return StoredRows(BLOCKS[tensor.type], self._ordered(name, tensor).view(shape[0], -1).clone())

    def _find(self, name: str, shape: tuple[int, ...]) -> GGUFTensor:
        stored, expert = _gguf_name(name, self._file.architecture)
        tensor = self._file.tensors.get(stored)
        if tensor is None:
            raise missing(f"{stored} ({name})")
        if expert is not None:
            tensor = _part(tensor, expert)
        check_shape(stored, tensor.shape, shape)
        return tensor

    def _ordered(self, name: str, tensor: GGUFTensor) -> torch.Tensor:
        """Return the tensor's stored bytes, rows in our order, valid until the next call."""
        raw = self.bytes_of(tensor)
        if self._permuted is not None and any(part in name for part in _ROTATED):
            half_split_rows(raw.view(tensor.shape[0], -1), self._permuted[0 if "q_proj" in name else 1])
        return raw

    def rope_divisors(self) -> torch.Tensor | None:
        """Return the file's per-frequency divisors of the rotary embedding (Llama 3), or None."""
        tensor = self._file.tensors.get("rope_freqs.weight")
        if tensor is None:
            return None
        out = torch.empty(tensor.shape)
        dequantise(self.bytes_of(tensor), tensor.type, out)
        return out

    def bytes_of(self, tensor: GGUFTensor) -> torch.Tensor:
        """Return the tensor's stored bytes, valid until the next call."""
        length = stored_bytes(tensor.type, math.prod(tensor.shape))
        if length > len(self._buffer):
            self._buffer = torch.empty(length, dtype=torch.uint8)
        found = self._buffer[:length]
        target: Any = found.numpy()
        path = self._file.parts[tensor.part]
        try:
            with path.open("rb") as file:
                file.seek(tensor.offset)
                read = file.readinto(target)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}", param="model") from error
        if read != length:
            raise ConfigError(f"{path} ends inside {tensor.name}; download it again", param="model")
        return found


def half_split_rows(rows: torch.Tensor, heads: int) -> None:
    """Reorder in place stored rows [rows, bytes] of a q or k projection, or the entries of its bias.

    Each head goes from the interleaved order (0, d/2, 1, d/2 + 1, ...) to the half-split order (0, 1, ..., d - 1)."""
    for head in rows.view(heads, -1, rows.shape[1]):
        head.copy_(head.view(-1, 2, rows.shape[1]).transpose(0, 1).reshape(head.shape))


def _gguf_name(name: str, architecture: str) -> tuple[str, int | None]:
    """Return the tensor's name in a file and, where it holds the tensors of many experts, which of them."""
    if (expert := _EXPERT.fullmatch(name)) is not None:
        return f"blk.{expert[1]}.{_GGUF_EXPERTS[expert[3]]}.{expert[4]}", int(expert[2])
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _GGUF_TOP[name], None
    if layer[2] in _GGUF_PARAMETERS:
        return f"blk.{layer[1]}.{_GGUF_PARAMETERS[layer[2]]}", None
    own = _GGUF_LAYER[layer[3]]
    return f"blk.{layer[1]}.{_GGUF_OWN.get((architecture, own), own)}.{layer[4]}", None


def _parts_of(name: str) -> list[str]:
    """Return the names under which newer files keep a tensor in two."""
    layer = _LAYER.fullmatch(name)
    if layer is None or layer[2] != "self_attn.kv_b_proj.weight":
        return []
    return [f"blk.{layer[1]}.attn_{part}_b.weight" for part in "kv"]


def _part(tensor: GGUFTensor, index: int) -> GGUFTensor:
    """Return one of the tensors that are concatenated along the outermost dimension."""
    count, *shape = tensor.shape
    if index >= count:
        raise ConfigError(f"tensor {tensor.name} has {count} experts, the config says more", param="model")
    offset = tensor.offset + index * stored_bytes(tensor.type, math.prod(shape))
    return replace(tensor, shape=tuple(shape), offset=offset)


def missing(name: str) -> ConfigError:
    """Return the error for a tensor that the model's files lack."""
    return ConfigError(f"the model's files lack the tensor {name}", param="model")


def check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raise ConfigError where a tensor's shape differs from the config's."""
    if found != wanted:
        raise ConfigError(f"tensor {name} has shape {found}, the config says {wanted}", param="model")

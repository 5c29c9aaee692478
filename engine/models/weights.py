"""Weights: source of a decoder's tensors by their Hugging Face names; GGUFWeights reads them from a GGUF file."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Protocol

import torch

from kvferry.engine.models.dequantise import BLOCKS, CODED, dequantise, stored_bytes
from kvferry.engine.models.gguf_names import fused_in, gguf_name, header_entry, parts_of
from kvferry.engine.models.mxfp4 import RUN, codes_of_blocks
from kvferry.kernels.decoder_spec import Stored, StoredRows
from kvferry.model_files.gguf import GGUFFile, GGUFTensor
from kvferry.protocol.errors import ConfigError

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
        if (entry := header_entry(name)) is not None:
            out.fill_(self._of_header(*entry))
            return
        parts = [self._file.tensors.get(part) for part in parts_of(name)]
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
        stored, expert = gguf_name(name, self._file.architecture)
        tensor = self._file.tensors.get(stored)
        if tensor is None:
            return self._find_fused(name, stored, shape)
        if expert is not None:
            tensor = _part(tensor, expert)
        flat = shape[1:] if shape[0] == 1 else shape  # converters drop a dimension of one
        check_shape(stored, tensor.shape, flat if tensor.shape == flat else shape)
        return tensor

    def _find_fused(self, name: str, stored: str, shape: tuple[int, ...]) -> GGUFTensor:
        """Return q, k or v where the file has one tensor of all three."""
        where, part = fused_in(name) or ("", "")
        tensor = self._file.tensors.get(where)
        if tensor is None:
            raise missing(f"{stored} ({name})")
        rows = tensor.shape[0]
        first = 0 if part == "q" else rows - shape[0] * (2 if part == "k" else 1)
        if rows < shape[0] or first < 0:
            check_shape(where, tensor.shape, (shape[0] * 3, *shape[1:]))
        found = replace(
            tensor,
            shape=(shape[0], *tensor.shape[1:]),
            offset=tensor.offset + first * stored_bytes(tensor.type, math.prod(tensor.shape[1:])),
        )
        check_shape(where, found.shape, shape)
        return found

    def _of_header(self, key: str, layer: int) -> float:
        """Return a layer's entry of a list in the header, or the one number for all layers."""
        found = self._file.metadata.get(key)
        value = found[layer] if isinstance(found, list) and layer < len(found) else found
        if not isinstance(value, int | float):
            raise ConfigError(f"{self._file.path.name}: {key} has no number for layer {layer}", param="model")
        return float(value)

    def _ordered(self, name: str, tensor: GGUFTensor) -> torch.Tensor:
        """Return the tensor's stored bytes, rows in our order, valid until the next call."""
        raw = self.bytes_of(tensor)
        if self._permuted is not None and any(part in name for part in _ROTATED):
            half_split_rows(raw.view(tensor.shape[0], -1), self._permuted[0 if "q_proj" in name else 1])
        return raw

    def rope_divisors(self) -> torch.Tensor | None:
        """Return the file's per-frequency divisors of the rotary embedding (Llama 3), or None."""
        tensor = self._file.tensors.get("rope_freqs.weight")
        return None if tensor is None else self._values(tensor)

    def vector(self, name: str, size: int) -> torch.Tensor:
        """Return a tensor of one dimension under its name in the file, in float32. Raises ConfigError as `read`."""
        tensor = self._file.tensors.get(name)
        if tensor is None:
            raise missing(name)
        check_shape(name, tensor.shape, (size,))
        return self._values(tensor)

    def _values(self, tensor: GGUFTensor) -> torch.Tensor:
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


def check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raise ConfigError where a tensor's shape differs from the config's."""
    if found != expected:
        raise ConfigError(f"tensor {name} has shape {found}, the config says {expected}", param="model")

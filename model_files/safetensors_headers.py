"""Reads the tensor table of a safetensors checkpoint, and derives the memory that its weights take."""

from __future__ import annotations

import json
import math
import operator
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvferry.model_files.quantisation import AWQ, Quantisation
from kvferry.protocol.errors import ConfigError

_LONGEST_HEADER = 1 << 28
_RUN = 32
_BESIDE = ("qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape",
           "weight_g_idx", "input_scale", "input_zero_point")  # fmt: skip
"""Names of the parts of a quantised layer other than its codes."""
_BLOCKS, _BLOCK_SCALES = "_blocks", "_scales"
"""Suffixes of experts in MXFP4: codes of 32 inputs in 16 bytes [experts, outputs, runs, 16], and their scales."""
Entry = tuple[str, tuple[int, ...]]
"""Number format as in the header, and shape."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a checkpoint: name, shape and stored size in bytes."""

    name: str
    shape: tuple[int, ...]
    stored_bytes: float | None = None
    """Size in the few-bit form that runs on a CPU, in bytes; None if it runs in the model's number format."""
    coded_bytes: float | None = None
    """Size in the few-bit form that runs on a GPU, in bytes; None if it runs in the model's number format."""


def safetensors_header(path: Path) -> dict[str, Entry]:
    """Return the tensor table of a safetensors file (https://huggingface.co/docs/safetensors). Raises ConfigError."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, _LONGEST_HEADER)))
        return {
            name: (str(entry["dtype"]), tuple(map(operator.index, entry["shape"])))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"cannot read the header of {path}; download it again", param="model") from error


def weights_of(entries: Mapping[str, Entry], quantised: Quantisation | None) -> Iterator[Tensor]:
    """Return a quantised checkpoint's layers as weights [out, in], and stacks as one weight each."""
    for name, (dtype, shape) in entries.items():
        layer, _, part = name.rpartition(".")
        stack = name.removesuffix(_BLOCKS)
        if f"{stack}{_BLOCK_SCALES}" in entries and stack != name:
            *outer, runs, half = shape
            weights = (*outer, 2 * runs * half)
            count = math.prod(weights)
            yield Tensor(stack, weights, count * (5 / 8 + 2 / _RUN), count * (4 / 8 + 2 / _RUN))
        elif f"{name.removesuffix(_BLOCK_SCALES)}{_BLOCKS}" in entries:
            continue
        elif quantised is None:
            yield Tensor(name, shape)
        elif part in ("qweight", "weight_packed"):
            outputs, inputs, bits = _sizes(entries, layer, part, shape, quantised)
            whole = not quantised.group
            size = _form_bytes(bits, outputs, inputs, quantised, whole)
            coded = _coded_bytes(bits, outputs, inputs, quantised, inputs if whole else quantised.group)
            yield Tensor(f"{layer}.weight", (outputs, inputs), size, coded)
        elif part == "weight" and len(shape) == 2 and dtype in ("I8", "F8_E4M3", "F8_E5M2"):
            whole = dtype == "I8" and math.prod(entries.get(f"{layer}.weight_scale", ("", ()))[1]) in (1, shape[0])
            group = quantised.block[1] if quantised.block else max(1, shape[1] // _groups(entries, layer))
            coded = None if dtype == "F8_E5M2" else _coded_bytes(8, *shape, quantised, group, scale=4)
            yield Tensor(name, shape, _form_bytes(8, *shape, quantised, whole), coded)
        elif part not in _BESIDE:
            yield Tensor(name, shape)


def _sizes(
    entries: Mapping[str, Entry], layer: str, part: str, shape: tuple[int, ...], quantised: Quantisation
) -> tuple[int, int, int]:
    """Return the number of outputs, of inputs and of bits per code of a layer stored in 32-bit words."""
    if quantised.method == AWQ:
        return 8 * shape[1], shape[0], 4
    if part == "qweight":
        zeros = entries.get(f"{layer}.qzeros", ("", (0, 0)))[1]
        bits = 32 * zeros[1] // shape[1] or quantised.bits
        return shape[1], 32 * shape[0] // bits, bits
    groups = entries.get(f"{layer}.weight_scale", ("", (0, 0)))[1][1]
    inputs = quantised.group * groups or 32 * shape[1] // quantised.bits
    return shape[0], inputs, 32 * shape[1] // inputs


def _groups(entries: Mapping[str, Entry], layer: str) -> int:
    """Return the number of groups of an output's inputs, from the scales of a layer stored in bytes."""
    shape = entries.get(f"{layer}.weight_scale", ("", ()))[1]
    return max(1, shape[1]) if len(shape) == 2 else 1


def _coded_bytes(
    bits: int, outputs: int, inputs: int, quantised: Quantisation, group: int, scale: int = 2
) -> float | None:
    """Return the bytes of the form that `kernels.gpu_weight_layout` finds. scale: bytes of one scale."""
    narrow, whole = bits < 8, group >= inputs
    if not whole and inputs % group and quantised.block is None:
        return None
    if (group & -group < _RUN // 2 and (narrow or not whole)) or (narrow and inputs % _RUN):
        return None
    offsets = 0 if quantised.symmetric or bits in (2, 3) else 2
    return outputs * (inputs * (0.5 if narrow else 1.0) + -(-inputs // group) * (scale + offsets))


def _form_bytes(bits: int, outputs: int, inputs: int, quantised: Quantisation, whole: bool) -> float | None:
    """Return the bytes of the form that `kernels.cpu.coded_layers` finds. whole: an output has one scale."""
    if inputs % _RUN:
        return None
    if whole and bits == 8 and quantised.symmetric:
        return outputs * (inputs + 4.0)
    odd = quantised.ordered or quantised.group % _RUN or bits == 8
    size = 8 if odd else 5 if bits == 4 and not quantised.symmetric else 4
    return outputs * inputs * (size / 8 + 2 / _RUN)

"""Reads weights of checkpoints quantised by GPTQ, AWQ, fp8 or compressed-tensors, as codes (int or fp8) with scales."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from kvferry.kernels.quantised_codes import Codes
from kvferry.model_files.quantisation import AWQ, GPTQ, Quantisation
from kvferry.protocol.errors import ConfigError

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each of eight neighbouring outputs' codes in an AWQ word, lowest bits first."""
_SCALES = ("weight_scale", "weight_scale_inv")
_CODED = ("qweight", "weight_packed", *_SCALES)
"""Last parts of names that only a quantised layer has."""


class Tensors(Protocol):
    """Checkpoint's tensors as they are stored."""

    def find(self, name: str) -> torch.Tensor | None:
        """Return the tensor of that name, or None."""

    def holds(self, name: str) -> bool:
        """Return whether there is one of that name."""

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""

    def read(self, name: str, out: torch.Tensor) -> None:
        """Read a tensor as `Weights.read` does."""


class QuantisedWeights:
    """Implements `engine.models.weights.Weights`.

    Layers without codes are read as plain, whatever exceptions the config lists."""

    def __init__(self, tensors: Tensors, quantisation: Quantisation) -> None:
        self._tensors = tensors
        self._quantisation = quantisation

    def holds(self, name: str) -> bool:
        """Return whether there is such a weight, plain or not."""
        layer = name.removesuffix(".weight")
        return any(self._tensors.holds(each) for each in (name, f"{layer}.qweight", f"{layer}.weight_packed"))

    def coded(self) -> list[str]:
        """Return the layers that are stored in codes."""
        parts = (name.rpartition(".") for name in self._tensors.names())
        return sorted({layer for layer, _, kind in parts if kind in _CODED})

    def read(self, name: str, out: torch.Tensor) -> None:
        codes = self._codes(name, tuple(out.shape))
        if codes is None:
            self._tensors.read(name, out)
        else:
            codes.write(out)

    def stored(self, name: str, shape: tuple[int, int]) -> Codes | None:
        return self._codes(name, shape)

    def _codes(self, name: str, shape: tuple[int, ...]) -> Codes | None:
        """Return the codes of the weight `name`; None if it is plain. Raises ConfigError if its tensors do not fit."""
        layer, _, kind = name.rpartition(".")
        if kind != "weight" or len(shape) != 2:
            return None
        try:
            found = self._layer(layer, shape[0], shape[1])
        except (RuntimeError, ValueError, IndexError, ZeroDivisionError) as error:
            raise ConfigError(f"the tensors of {layer} do not fit each other: {error}", param="model") from error
        if found is not None and tuple(found.values.shape) != shape:
            raise ConfigError(
                f"tensor {name} has shape {tuple(found.values.shape)}, the config says {shape}", param="model"
            )
        return found

    def _layer(self, layer: str, rows: int, columns: int) -> Codes | None:
        method = self._quantisation.method
        if (words := self._tensors.find(f"{layer}.qweight")) is not None:
            return self._awq(layer, words) if method == AWQ else self._gptq(layer, words, columns)
        if (words := self._tensors.find(f"{layer}.weight_packed")) is not None:
            return self._packed(layer, words, rows, columns)
        values = self._tensors.find(f"{layer}.weight")
        if values is None or (values.is_floating_point() and values.itemsize > 1):
            return None
        return self._bytes(layer, values)

    def _gptq(self, layer: str, words: torch.Tensor, columns: int) -> Codes:
        """Return the codes of GPTQ words [in * bits / 32, out] with codes of neighbouring inputs.

        Words of zero points [groups, out * bits / 32] hold those of neighbouring outputs."""
        if self._quantisation.method != GPTQ:
            raise ConfigError(f"{layer}.qweight is not in the format of {self._quantisation.method}", param="model")
        bits = 32 * len(words) // columns
        codes = of_bytes(words.t().contiguous().view(torch.uint8), bits)
        zeros = of_bytes(self._need(layer, "qzeros").contiguous().view(torch.uint8), bits).t()
        scales = self._need(layer, "scales").t().float()
        zeros = zeros.to(torch.int16) + self._quantisation.zero
        return Codes.offset(codes, zeros, scales, self._order(layer, "g_idx", columns, scales.shape[1]))

    def _awq(self, layer: str, words: torch.Tensor) -> Codes:
        """Return the codes of AWQ words [in, out / 8], eight outputs a word; zero points are [groups, out / 8]."""
        codes, zeros = (
            of_bytes(each.contiguous().view(torch.uint8), 4).view(len(each), -1, 8)[..., _AWQ_ORDER].flatten(1).t()
            for each in (words, self._need(layer, "qzeros"))
        )
        return Codes.offset(codes, zeros.to(torch.int16), self._need(layer, "scales").t().float(), None)

    def _packed(self, layer: str, words: torch.Tensor, rows: int, columns: int) -> Codes:
        """Return the codes of words [out, in * bits / 32] of neighbouring inputs, offset by half their range.

        Words of zero points [out * bits / 32, groups] hold those of neighbouring outputs, with the same offset."""
        bits = 32 * words.shape[1] // columns
        codes = of_bytes(words.contiguous().view(torch.uint8), bits)
        scales = self._need(layer, "weight_scale").float().view(rows, -1)
        zeros = torch.full((1, 1), 1 << (bits - 1), dtype=torch.int16)
        if (packed := self._tensors.find(f"{layer}.weight_zero_point")) is not None:
            zeros = of_bytes(packed.t().contiguous().view(torch.uint8), bits).t().to(torch.int16)
        return Codes.offset(codes, zeros, scales, self._order(layer, "weight_g_idx", columns, scales.shape[1]))

    def _bytes(self, layer: str, values: torch.Tensor) -> Codes:
        """Return the codes of int8 or fp8 [out, in]; scales are one for all, or per output, input group or block."""
        scales = next((each for name in _SCALES if (each := self._tensors.find(f"{layer}.{name}")) is not None), None)
        if scales is None:
            raise ConfigError(f"the model's files lack the tensor {layer}.{_SCALES[0]}", param="model")
        scales = scales.float().view(len(scales) if scales.dim() else 1, -1)
        zeros = self._tensors.find(f"{layer}.weight_zero_point")
        if zeros is not None and not values.is_floating_point():
            return Codes.offset(values, zeros.to(torch.int16).view(len(zeros), -1), scales, None)
        tall = len(scales) not in (1, len(values))
        return Codes(values, scales, self._quantisation.block if tall else None)

    def _order(self, layer: str, name: str, columns: int, groups: int) -> torch.Tensor | None:
        """Return each input's group; None where groups are neighbours, in their order."""
        index = self._tensors.find(f"{layer}.{name}")
        if index is None or torch.equal(index.long(), torch.arange(columns) // -(-columns // groups)):
            return None
        if len(index) != columns or int(index.min()) < 0 or int(index.max()) >= groups:
            raise ConfigError(f"{layer}.{name} does not give a group for each input", param="model")
        return index.long()

    def _need(self, layer: str, name: str) -> torch.Tensor:
        found = self._tensors.find(f"{layer}.{name}")
        if found is None:
            raise ConfigError(f"the model's files lack the tensor {layer}.{name}", param="model")
        return found


def of_bytes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack codes [.., n * 8 / bits] from bytes [.., n], lowest bits first. Raises ValueError."""
    if bits == 8:
        return packed
    if bits in (2, 4):
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        return ((packed[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)
    if bits != 3:
        raise ValueError(f"codes of {bits} bits")
    single = ((packed[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)
    parts = single.view(*single.shape[:-1], -1, 3)
    return parts[..., 0] | parts[..., 1] << 1 | parts[..., 2] << 2

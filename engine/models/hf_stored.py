"""Finds the stored rows of a GGUF or a quantised checkpoint for the dense layers of transformers' modules."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch

from kvferry.engine.models.dense_forms import DenseForms
from kvferry.engine.models.dequantise import BLOCKS, dequantise
from kvferry.engine.models.hf_dense import DenseModule, outputs_first
from kvferry.engine.models.quantised import QuantisedWeights
from kvferry.engine.models.weights import GGUFWeights
from kvferry.kernels.decoder_spec import StoredRows
from kvferry.model_files.gguf import GGUFFile, GGUFTensor
from kvferry.protocol.errors import ConfigError

_NEAR = 2**-6
"""Largest difference of two values relative to a row's largest: transformers computes them in bfloat16."""


class GGUFRows:
    """Tensors of a GGUF in block formats, found by their values.

    That works for any name that transformers gives a layer. If transformers changed the weight, no tensor has its
    values, and the weight is not replaced."""

    def __init__(self, file: GGUFFile) -> None:
        self._weights = GGUFWeights(file, None)
        self._known: defaultdict[tuple[int, ...], list[tuple[GGUFTensor, torch.Tensor]]] = defaultdict(list)
        for tensor in file.tensors.values():
            if tensor.type in BLOCKS and len(tensor.shape) == 2:
                first = self._values(replace(tensor, shape=(1, tensor.shape[1])))
                self._known[tensor.shape].append((tensor, first))

    def __call__(self, weight: torch.Tensor) -> StoredRows | None:
        """Return the rows that stand for this weight [out, in], on its device."""
        values = weight.cpu()
        for tensor, first in self._known.get(tuple(weight.shape), ()):
            if _near(first, values[:1]) and _near(self._values(tensor), values):
                raw = self._weights.bytes_of(tensor)
                return StoredRows(BLOCKS[tensor.type], raw.view(len(weight), -1).clone()).to(weight.device)
        return None

    def _values(self, tensor: GGUFTensor) -> torch.Tensor:
        out = torch.empty(tensor.shape)
        dequantise(self._weights.bytes_of(tensor), tensor.type, out)
        return out


def _near(values: torch.Tensor, weight: torch.Tensor) -> bool:
    return bool(((values - weight).abs().amax(1) <= _NEAR * values.abs().amax(1)).all())


def coded_layers(
    skeleton: Any, weights: QuantisedWeights, forms: DenseForms, dtype: torch.dtype, device: torch.device
) -> dict[str, DenseModule]:
    """Return the layers, by name, that a quantised checkpoint stores as codes, for a model without weights.

    Raises ConfigError if one is none of the model's dense layers, or if its tensors do not fit."""
    names = weights.coded()
    if not names:
        raise ConfigError("its config says that it is quantised, and its files hold no codes", param="model")
    return {name: _coded(name, skeleton, weights, forms, dtype, device) for name in names}


def _coded(
    name: str, skeleton: Any, weights: QuantisedWeights, forms: DenseForms, dtype: torch.dtype, device: torch.device
) -> DenseModule:
    module = dict(skeleton.named_modules()).get(name)
    shaped = None if module is None else outputs_first(module)
    if module is None or shaped is None:
        raise ConfigError(f"its quantized {name} is not a dense layer of {type(skeleton).__name__}", param="model")
    bias = None
    if module.bias is not None:
        weights.read(f"{name}.bias", bias := torch.empty(module.bias.shape, dtype=dtype, device=device))
    rows, columns = shaped.shape
    stored = weights.stored(f"{name}.weight", (rows, columns)) if forms.as_stored else None
    linear = None if stored is None else forms.of_rows([stored], columns, bias)
    if linear is None:
        weight = torch.empty(rows, columns, dtype=dtype, device=device)
        weights.read(f"{name}.weight", weight)
        linear = forms.of_weight(weight, bias)
    return DenseModule(linear, shaped)

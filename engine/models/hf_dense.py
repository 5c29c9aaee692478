"""Replaces the dense layers and the embedding of transformers' modules by packed or stored (quantised) layers.

Code that looks at such a layer's weight, as some modules do, finds its shape and number format, but no values. This
module does not import transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kvferry.engine.models.dense_forms import DenseForms
from kvferry.kernels.decoder_spec import StoredRows
from kvferry.kernels.linear import Linear
from kvferry.kernels.torch_operations import TorchLinear

StoredAs = Callable[[torch.Tensor], StoredRows | None]
"""Returns the rows of a file that hold the values of a weight [out, in], or None."""
_TRIED = (24, 40)
"""Outputs and inputs of the layers on which a kind of module is tried."""


class DenseModule(nn.Module):
    """Replacement of a dense layer."""

    def __init__(self, linear: Linear, weight: torch.Tensor) -> None:
        super().__init__()
        self.linear = linear
        self.weight = weight.to("meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of x [..., in]: [..., out]."""
        return self.of_rows(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    def of_rows(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Implement `Linear.of_rows`."""
        return self.linear(x, dtype)


class EmbeddingModule(nn.Module):
    """Replacement of the token embedding."""

    def __init__(self, linear: Linear, weight: torch.Tensor) -> None:
        super().__init__()
        self.linear = linear
        self.weight = weight.to("meta")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids [...]: [..., hidden]."""
        return self.linear.rows(ids.flatten()).view(*ids.shape, -1)


def outputs_first(module: nn.Module) -> torch.Tensor | None:
    """Return the weight [out, in] of a dense layer; None: the module is something else."""
    kind: Any = type(module)
    weight: Any = getattr(module, "weight", None)
    if _is_linear(kind):
        return weight.detach()  # type: ignore[no-any-return]
    return weight.detach().t() if _is_conv1d(kind) else None


@torch.no_grad()
def pack_modules(model: Any, forms: DenseForms, stored_as: StoredAs | None = None) -> None:
    """Replace the model's dense layers by ours if the operations keep the weight in a form of their own.

    A layer that shares its weight with the token embedding shares its form, too. Layers are packed one after the other,
    so that only one weight is in memory twice."""
    dense = _Dense(forms, stored_as)
    words = model.get_input_embeddings()
    tied = words.weight if type(words) is nn.Embedding and words.max_norm is None else None
    embedding = None if tied is None else dense.form(tied.detach(), None)
    for name in [name for name, _ in model.named_modules()]:
        module = model.get_submodule(name)
        if module is words and embedding is not None:
            model.set_submodule(name, EmbeddingModule(embedding, words.weight))
        elif (weight := outputs_first(module)) is not None:
            shared = module.weight is tied and module.bias is None
            linear = embedding if shared else dense.form(weight, module.bias)
            if linear is not None:
                model.set_submodule(name, DenseModule(linear, weight))


class _Dense:
    def __init__(self, forms: DenseForms, stored_as: StoredAs | None) -> None:
        self._forms = forms
        self._stored_as = stored_as

    def form(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear | None:
        """Return the layer of a weight that the operations pack; None: the weight stays as it is."""
        if weight.dtype != torch.bfloat16:
            return None
        if self._stored_as is not None and self._forms.as_stored and (rows := self._stored_as(weight)) is not None:
            packed = self._forms.of_rows([rows], weight.shape[1], bias)
            if packed is not None:
                return packed
        linear = self._forms.of_weight(weight.contiguous(), bias)
        return None if isinstance(linear, TorchLinear) else linear


@cache
def _is_linear(kind: Any) -> bool:
    """Return whether its modules are dense layers: those of PyTorch, or a kind made of them that computes the same."""
    if not issubclass(kind, nn.Linear):
        return False
    return kind is nn.Linear or _computes(kind, _TRIED[::-1], lambda tried: tried.weight)


@cache
def _is_conv1d(kind: Any) -> bool:
    """Return whether its modules are what GPT-2 calls Conv1D: dense layers whose weights lie inputs first."""
    return kind.__name__ == "Conv1D" and _computes(kind, _TRIED, lambda tried: tried.weight.t())


@torch.no_grad()
def _computes(kind: Any, sizes: tuple[int, int], weight_of: Callable[[Any], torch.Tensor]) -> bool:
    try:
        tried = kind(*sizes).float()
    except TypeError:
        return False
    if {name for name, _ in tried.named_parameters()} != {"weight", "bias"}:
        return False
    random = torch.Generator().manual_seed(1)
    for parameter in tried.parameters():
        parameter.normal_(generator=random)
    x = torch.randn(1, 2, _TRIED[1], generator=random)
    return torch.allclose(tried(x), F.linear(x, weight_of(tried), tried.bias), atol=1e-4)

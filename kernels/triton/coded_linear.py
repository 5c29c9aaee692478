"""CodedLinear: a dense layer over quantised weights (CodedForm) on the Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvferry.kernels.gpu_weight_layout import CodedForm
from kvferry.kernels.triton.coded_product import product


class CodedLinear:
    """A `StoredLinear` over concatenated forms, of x [n, in]; bias [out], or None."""

    def __init__(self, forms: Sequence[CodedForm], columns: int, bias: torch.Tensor | None, processors: int) -> None:
        self.kinds = frozenset(form.kind for form in forms)
        self._forms, self._columns, self._bias, self._processors = tuple(forms), columns, bias, processors
        self._outputs = sum(len(form.codes) for form in forms)

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        out, first = torch.empty(len(x), self._outputs, dtype=dtype or x.dtype, device=x.device), 0
        for form in self._forms:
            behind = first + len(form.codes)
            bias = None if self._bias is None else self._bias[first:behind]
            product(x, form, bias, out[:, first:behind], self._processors)
            first = behind
        return out

    @property
    def memory(self) -> int:
        """Return bytes of the forms."""
        return sum(form.memory for form in self._forms)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows in bfloat16."""
        out, first = torch.empty(len(ids), self._columns, dtype=torch.bfloat16, device=ids.device), 0
        for form in self._forms:
            mine = form.rows((ids - first).clamp(0, len(form.codes) - 1)).to(out.dtype)
            out = mine if not first else torch.where((ids >= first)[:, None], mine, out)
            first += len(form.codes)
        return out

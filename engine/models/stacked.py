"""Expert weights that a checkpoint stacks in one tensor per layer: gpt-oss, plain or in MXFP4."""

from __future__ import annotations

import re

import torch

from kvferry.engine.models.mxfp4 import RUN, codes_of
from kvferry.engine.models.quantised import Tensors
from kvferry.engine.models.weights import check_shape, missing
from kvferry.kernels.quantised_codes import Codes
from kvferry.protocol.errors import ConfigError

_TENSOR = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")


class StackedWeights:
    """Implements `engine.models.weights.Weights` for stacked experts.

    Experts have the names of other checkpoints: model.layers.i.mlp.experts.e.gate_proj and so on. Gate and up are one
    tensor in which their outputs alternate; plain weights have inputs first."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def holds(self, name: str) -> bool:
        return self._tensors.holds(name)

    def read(self, name: str, out: torch.Tensor) -> None:
        if (codes := self._codes(name, tuple(out.shape))) is not None:
            codes.write(out)
        elif (found := _TENSOR.fullmatch(name)) is None:
            self._tensors.read(name, out)
        elif found[4] == "bias":
            self._copy(name, self._part(found, "_bias"), out)
        else:
            self._copy(name, self._part(found, "", outputs=-1).t(), out)

    def stored(self, name: str, shape: tuple[int, int]) -> Codes | None:
        return self._codes(name, shape)

    def _copy(self, name: str, part: torch.Tensor, out: torch.Tensor) -> None:
        check_shape(name, tuple(part.shape), tuple(out.shape))
        out.copy_(part)

    def _codes(self, name: str, shape: tuple[int, ...]) -> Codes | None:
        """Return an expert's weight in MXFP4; None if it is plain, or no expert's weight.

        Blocks are bytes [outputs, runs, 16], low nibbles first; scales are [outputs, runs]."""
        found = _TENSOR.fullmatch(name)
        if found is None or found[4] == "bias" or not self._tensors.holds(f"{_stack(found)}_blocks"):
            return None
        blocks, scales = self._part(found, "_blocks"), self._part(found, "_scales")
        check_shape(name, (len(blocks), blocks[0].numel() * 2), shape)
        check_shape(f"{_stack(found)}_scales", tuple(scales.shape), (shape[0], shape[1] // RUN))
        return codes_of(torch.stack((blocks & 15, blocks >> 4), -1).view(shape), scales)

    def _part(self, found: re.Match[str], ending: str, outputs: int = 0) -> torch.Tensor:
        """Return an expert's part of a stack. outputs: dimension of the rest along which gate and up alternate."""
        name, expert = _stack(found) + ending, int(found[2])
        stack = self._tensors.find(name)
        if stack is None:
            raise missing(name)
        if expert >= len(stack):
            raise ConfigError(f"tensor {name} has {len(stack)} experts, the config says more", param="model")
        part = stack[expert]
        if found[3] == "down":
            return part
        turns = slice(0 if found[3] == "gate" else 1, None, 2)
        return part[..., turns] if outputs else part[turns]


def _stack(found: re.Match[str]) -> str:
    return f"{found[1]}.{'down' if found[3] == 'down' else 'gate_up'}_proj"

"""Reads expert weights that a checkpoint stacks in one tensor per layer, plain or in MXFP4."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from kvferry.engine.models.family import ExpertNames, Stack
from kvferry.engine.models.mxfp4 import RUN, codes_of
from kvferry.engine.models.quantised import Tensors
from kvferry.engine.models.weights import check_shape, missing
from kvferry.kernels.quantised_codes import Codes
from kvferry.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Part:
    """Part of a stored tensor. stored: its name. projection: gate, up or down. expert: None: of a tensor of one MLP."""

    stored: str
    projection: str
    bias: bool
    expert: int | None


class StackedWeights:
    """Implements `engine.models.weights.Weights` for stacked experts.

    Experts have the names of other checkpoints: model.layers.i.mlp.experts.e.gate_proj and so on."""

    def __init__(self, tensors: Tensors, names: ExpertNames, stack: Stack) -> None:
        self._tensors, self._stack = tensors, stack
        self._names = re.compile(
            rf"(model\.layers\.\d+\.)(?:{re.escape(names.experts)}\.(\d+)|{re.escape(names.shared)})"
            r"\.(gate|up|down)_proj\.(weight|bias)"
        )

    def holds(self, name: str) -> bool:
        return self._tensors.holds(name)

    def read(self, name: str, out: torch.Tensor) -> None:
        part = self._part(name)
        if part is None:
            self._tensors.read(name, out)
        elif (codes := self._codes(name, part, tuple(out.shape))) is not None:
            codes.write(out)
        else:
            found = self._tensor(part, f"{part.stored}{'_bias' if part.bias else ''}")
            if not part.bias and self._inputs_first(part, tuple(found.shape), tuple(out.shape)):
                found = found.t()
            found = self._of_gate_or_up(part, found)
            check_shape(name, tuple(found.shape), tuple(out.shape))
            out.copy_(found)

    def stored(self, name: str, shape: tuple[int, int]) -> Codes | None:
        part = self._part(name)
        return None if part is None else self._codes(name, part, shape)

    def _part(self, name: str) -> _Part | None:
        """Return where a weight or bias of an expert lies; None: it is a tensor by itself."""
        found, stack = self._names.fullmatch(name), self._stack
        if found is None:
            return None
        gate_up, down = (stack.gate_up, stack.down) if found[2] else (stack.shared_gate_up, stack.shared_down)
        if not gate_up:
            return None
        stored = found[1] + (down if found[3] == "down" else gate_up)
        if self._tensors.holds(name):
            return None  # some checkpoints of a family hold each expert by itself
        return _Part(stored, found[3], found[4] == "bias", None if found[2] is None else int(found[2]))

    def _codes(self, name: str, part: _Part, shape: tuple[int, ...]) -> Codes | None:
        """Return an expert's weight in MXFP4; None if it is plain.

        Blocks are bytes [outputs, runs, 16], low nibbles first; scales are [outputs, runs]."""
        if part.bias or not self._tensors.holds(f"{part.stored}_blocks"):
            return None
        blocks, scales = (
            self._of_gate_or_up(part, self._tensor(part, f"{part.stored}_{ending}")) for ending in ("blocks", "scales")
        )
        check_shape(name, (len(blocks), blocks[0].numel() * 2), shape)
        check_shape(f"{part.stored}_scales", tuple(scales.shape), (shape[0], shape[1] // RUN))
        return codes_of(torch.stack((blocks & 15, blocks >> 4), -1).view(shape), scales)

    def _inputs_first(self, part: _Part, stored: tuple[int, ...], expected: tuple[int, ...]) -> bool:
        """Return whether a weight has its inputs first: transformers saves those of some families the other way."""
        outputs_first = (expected[0] * (1 if part.projection == "down" else 2), *expected[1:])
        return self._stack.inputs_first and (stored != outputs_first or stored == outputs_first[::-1])

    def _tensor(self, part: _Part, name: str) -> torch.Tensor:
        """Return the expert's part of the tensor called `name`, of gate and up together."""
        whole = self._tensors.find(name)
        if whole is None:
            raise missing(name)
        if part.expert is not None:
            if part.expert >= len(whole):
                raise ConfigError(f"tensor {name} has {len(whole)} experts, the config says more", param="model")
            whole = whole[part.expert]
        return whole

    def _of_gate_or_up(self, part: _Part, whole: torch.Tensor) -> torch.Tensor:
        """Return the part's outputs, which are the first dimension."""
        if part.projection == "down":
            return whole
        second = part.projection == "up"
        return whole[second::2] if self._stack.alternating else whole.tensor_split(2)[second]

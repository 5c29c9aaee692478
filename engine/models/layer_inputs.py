"""Per-layer embeddings of Gemma 3n and Gemma 4: each layer reads an input of its own, given by the token's id."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kvferry.engine.models.reader import TensorReader
from kvferry.kernels.gate_spec import GELU
from kvferry.kernels.linear import Linear
from kvferry.kernels.ops import Ops
from kvferry.model_files.layer_shapes import LayerShapes

Inputs = torch.Tensor | None
"""Inputs that the layers read of the tokens beside the hidden states, [T, layers, ..]; None for most families."""
Normed = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""RMS norm of x by a weight, in the model's epsilon."""


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Inputs of all layers: a part of an embedding for each, and a projection of the token's embedding.

    table: [words, layers * size]. projection: hidden to layers * size. norm: [size]."""

    table: Linear
    projection: Linear
    norm: torch.Tensor
    words: int

    def of(self, token_ids: torch.Tensor, embedded: torch.Tensor, normed: Normed) -> torch.Tensor:
        """Return [T, layers, size] of tokens and their embeddings [T, hidden].

        Tokens beyond the table are its first."""
        known = token_ids.masked_fill(token_ids >= self.words, 0)
        shape = len(token_ids), -1, len(self.norm)
        projected = normed(self.projection(embedded).view(shape), self.norm)
        both: torch.Tensor = projected + self.table.rows(known).view(shape)
        return both * math.sqrt(0.5)


@dataclass(frozen=True, slots=True)
class InputGate:
    """Part of a layer that adds its input: the layer's result opens a gate for it.

    gate: hidden to size. projection: size to hidden. norm: [hidden], of the output."""

    gate: Linear
    projection: Linear
    norm: torch.Tensor

    def __call__(self, x: torch.Tensor, given: torch.Tensor, ops: Ops, normed: Normed) -> torch.Tensor:
        """Return the term to add, for x [T, hidden] and the layer's input [T, size]."""
        gated = ops.gate_mul(torch.cat((self.gate(x), given), 1), GELU)
        return normed(self.projection(gated), self.norm)

    def dense_layers(self) -> Iterator[Linear]:
        """Yield the dense layers."""
        yield from (self.gate, self.projection)


def read_inputs(reader: TensorReader, shapes: LayerShapes) -> LayerInputs | None:
    """Read the inputs of all layers; None for a model without them. Raises ConfigError as its reader does."""
    size, hidden = shapes.input_size, reader.config.hidden_size
    if not size:
        return None
    width, scale = size * len(shapes.sources), float(torch.tensor(size**0.5, dtype=reader.dtype))
    projection = [("model.per_layer_model_projection.weight", width)]
    return LayerInputs(
        table=reader.linear([("model.embed_tokens_per_layer.weight", shapes.input_words)], width, factor=scale),
        projection=reader.linear(projection, hidden, factor=hidden**-0.5),
        norm=reader.rms_norm("model.per_layer_projection_norm", size),
        words=shapes.input_words,
    )


def read_gate(reader: TensorReader, shapes: LayerShapes, prefix: str) -> InputGate | None:
    """Read the gate of a layer whose tensors have this prefix; None for a model without inputs."""
    size, hidden = shapes.input_size, reader.config.hidden_size
    if not size:
        return None
    return InputGate(
        gate=reader.dense(prefix, [("per_layer_input_gate", size)], hidden, False),
        projection=reader.dense(prefix, [("per_layer_projection", hidden)], size, False),
        norm=reader.rms_norm(f"{prefix}.post_per_layer_input_norm", hidden),
    )

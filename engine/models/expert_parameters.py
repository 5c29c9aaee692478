"""Reads the parameters of a layer's MLP with a gate, and of a mixture of experts."""

from __future__ import annotations

import torch

from kvferry.engine.models.experts_config import ExpertsConfig
from kvferry.engine.models.family import ExpertNames
from kvferry.engine.models.reader import TensorReader
from kvferry.kernels.decoder_spec import Experts, Gated
from kvferry.kernels.linear import Linear


def read_gated(
    reader: TensorReader, prefix: str, parts: tuple[str, ...], down: str, inner: int, width: int, bias: bool
) -> Gated:
    """Read an MLP. parts: names of gate and up, of both in one tensor, or of up alone.

    inner: its width; width: of its inputs and outputs. Raises ConfigError as its reader does."""
    outputs = inner if reader.config.activation is not None else 2 * inner
    gate_up = [(part, outputs // len(parts)) for part in parts]
    return Gated(
        gate_up=reader.dense(prefix, gate_up, width, bias),
        down=reader.dense(prefix, [(down, width)], inner, bias, reader.config.factors.residual),
    )


def read_experts(reader: TensorReader, experts: ExpertsConfig, names: ExpertNames, prefix: str) -> Experts:
    """Read the mixture of the layer whose tensors have this prefix. Raises ConfigError as its reader does."""
    config = reader.config
    hidden, width = config.hidden_size, experts.latent or config.hidden_size
    parts = (names.gate, names.up) if config.activation is None else (names.up,)
    router = _router(reader, f"{prefix}.{names.router}", names, experts.count)
    each = tuple(
        read_gated(
            reader, f"{prefix}.{names.experts}.{index}", parts, names.down, experts.size, width, names.biased
        )
        if index in experts.held
        else None
        for index in range(experts.count)
    )  # fmt: skip
    grouped = reader.ops.grouped(each)
    shared: Gated | None = None
    gate: torch.Tensor | None = None
    down: Linear | None = None
    up: Linear | None = None
    if experts.shared:
        shared = read_gated(
            reader, f"{prefix}.{names.shared}", parts, names.down, experts.shared, hidden, config.mlp_bias
        )
    if names.shared_gate:
        gate = reader.stack([(f"{prefix}.{names.shared_gate}.weight", 1)], hidden)
    if experts.latent:
        down = reader.dense(f"{prefix}.mlp", [("fc1_latent_proj", width)], hidden, config.mlp_bias)
        up = reader.dense(f"{prefix}.mlp", [("fc2_latent_proj", hidden)], width, config.mlp_bias)
    return Experts(
        router=router,
        each=each if grouped is None else grouped.each,
        grouped=grouped,
        routing=experts.routing,
        correction=_correction(reader, f"{prefix}.{names.correction}", names, experts.count),
        shared=shared,
        shared_gate=None if gate is None or shared is None else reader.ops.linear(gate),
        latent_down=down,
        latent_up=up,
    )


def _router(reader: TensorReader, name: str, names: ExpertNames, count: int) -> Linear:
    hidden = reader.config.hidden_size
    if names.precise:
        return reader.ops.linear(reader.float32(f"{name}.weight", count, hidden))
    bias = reader.stack([(f"{name}.bias", count)], None) if names.biased else None
    return reader.ops.linear(reader.stack([(f"{name}.weight", count)], hidden), bias)


def _correction(reader: TensorReader, name: str, names: ExpertNames, count: int) -> torch.Tensor | None:
    if not names.correction:
        return None
    return reader.float32(name, *((1, count) if names.correction_row else (count,))).view(-1)

"""Loads the dense layers that sentence-transformers models apply after pooling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvferry.engine.pooling import Dense
from kvferry.model_files.source import ModelSource, read_json
from kvferry.protocol.errors import ConfigError, reason

_ACTIVATIONS = {"Identity": torch.nn.Identity, "Tanh": torch.nn.Tanh, "ReLU": torch.nn.ReLU, "GELU": torch.nn.GELU}


def load_dense(source: ModelSource, folders: tuple[str, ...], device: torch.device) -> list[Dense]:
    """Load the layers of these folders, in order. Raises ConfigError."""
    return [_load(source.path / folder, device) for folder in folders]


def _load(path: Path, device: torch.device) -> Dense:
    name = str(read_json(path / "config.json").get("activation_function") or "Identity").rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise ConfigError(f"{path}: activation {name!r:.80} is not supported", param="model")
    try:
        tensors = _tensors(path)
        weight, bias = tensors["linear.weight"], tensors.get("linear.bias")
    except Exception as error:
        raise ConfigError(f"cannot read the weights of {path}: {reason(error)}", param="model") from error
    weight = weight.to(device, torch.float32)
    return Dense(weight, None if bias is None else bias.to(device, torch.float32), _ACTIVATIONS[name]())


def _tensors(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    file = path / "model.safetensors"
    if file.is_file():
        return load_file(file)
    found: dict[str, Any] = torch.load(path / "pytorch_model.bin", map_location="cpu", weights_only=True)
    return found

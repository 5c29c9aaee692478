"""Adapters as PEFT saves them, random ones, and models that have them merged: W + scale * B @ A."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvferry.model_files.adapter import TARGETS

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")


def module_of(target: str) -> str:
    return f"{'self_attn' if target in ATTENTION else 'mlp'}.{target}"


def save_adapter(
    path: Path,
    model: torch.nn.Module,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    targets: tuple[str, ...] = TARGETS,
    seed: int = 0,
    size: float = 0.1,
    **config: Any,
) -> Path:
    """A random adapter of transformers' `model`."""
    path.mkdir(parents=True, exist_ok=True)
    numbers = torch.Generator().manual_seed(seed)
    tensors = {}
    for index, layer in enumerate(model.model.layers):  # type: ignore[union-attr, arg-type]
        for target in targets:
            module = dict(layer.named_modules()).get(module_of(target))
            if module is None:  # of a layer that reads another layer's K/V
                continue
            weight = module.weight
            name = f"base_model.model.model.layers.{index}.{module_of(target)}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=numbers) * size
            tensors[f"{name}.lora_B.weight"] = torch.randn(weight.shape[0], rank, generator=numbers) * size
    save_file(tensors, path / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(facts | config))
    return path


def merge(model: torch.nn.Module, path: Path) -> Any:
    """The model itself, its weights changed as the adapter says."""
    config = json.loads((path / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    tensors = load_file(path / "adapter_model.safetensors")
    with torch.no_grad():
        for name in [name for name in tensors if name.endswith("lora_A.weight")]:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            added = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
            model.get_submodule(module).weight += scale * added  # type: ignore[operator]
    return model

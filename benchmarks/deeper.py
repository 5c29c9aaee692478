"""Makes a larger target model for the speculation benchmark: the demo model with added layers that have no effect.

The target is the demo model in bfloat16, followed by layers that add zero to their inputs. It produces the demo model's
text and takes as long as a model of that depth. Drafts by the demo model's file are accepted as often as its quantised
weights agree with the bfloat16 weights, which is more often than in most real pairs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SILENT = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""A layer's output is a product with one of these tensors."""


def deepen(plain: Path, target: Path, times: int) -> Path:
    """Write a copy of `plain` with `times` as many layers to `target`; return its path.

    `plain` is a directory with a model of the Llama family in one file of weights."""
    if target.exists():
        return target
    unfinished = target.with_suffix(".unfinished")
    shutil.copytree(plain, unfinished, dirs_exist_ok=True)
    config = json.loads((plain / "config.json").read_text())
    layers = config["num_hidden_layers"]
    config["num_hidden_layers"] = layers * times
    weights = load_file(plain / "model.safetensors")
    for name in [name for name in weights if name.startswith("model.layers.")]:
        _, _, index, part = name.split(".", 3)
        for more in range(1, times):
            like = weights[name]
            weights[f"model.layers.{int(index) + more * layers}.{part}"] = (
                torch.zeros_like(like) if part in SILENT else like.clone()
            )
    (unfinished / "config.json").write_text(json.dumps(config))
    save_file(weights, unfinished / "model.safetensors", {"format": "pt"})
    return unfinished.rename(target)

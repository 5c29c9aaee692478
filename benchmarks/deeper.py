"""A larger target for a draft model, where no pair of trained models is at hand: the demo model in bfloat16 with more
layers behind its own, which add nothing to what passes through them.

It says what the demo model says and takes as long as a model of that depth. So drafts of the demo model's file are
right as often as its quantised weights agree with the same ones in bfloat16: more often than those of most real pairs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SILENT = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""What a layer puts out is a product with one of these."""


def deepen(plain: Path, target: Path, times: int) -> Path:
    """`plain`, a directory with a model of the Llama family in one file of weights, with `times` as many layers."""
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

"""Checks the config of a LoRA adapter directory (PEFT), and hashes its weights file, unread otherwise, into its id."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.model_files.source import read_json
from kvferry.protocol.errors import ConfigError, reason

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
"""Names of the same modules in families whose checkpoints hold them fused."""
RENAMED = ("out_proj", "w1", "w3", "w2", "c_fc", "c_proj", "dense", "fc1", "fc2")
"""Names of o_proj, gate_proj, up_proj and down_proj in LFM2, StarCoder 2 and Phi."""
_REFUSED = {
    "use_dora": "DoRA is not supported",
    "rank_pattern": "ranks that differ by module are not supported",
    "alpha_pattern": "scales that differ by module are not supported",
    "modules_to_save": "replacing whole modules is not supported",
    "fan_in_fan_out": "transposed weights are not supported",
    "layer_replication": "replicated layers are not supported",
    "trainable_token_indices": "trained tokens are not supported",
    "target_parameters": "targets other than dense layers are not supported",
}
"""Settings of a config that this server refuses, and why. Without them an adapter is low-rank matrices and nothing
else."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """LoRA adapter whose config was checked.

    id: 32 hex digits of its content. scale: factor of the product of its matrices."""

    path: Path
    id: str
    rank: int
    scale: float


def read_adapter(path: str, max_rank: int) -> AdapterFiles:
    """Return the adapter in the directory `path`. Raises ConfigError naming what is missing, or cannot be served."""
    try:
        folder = Path(path).expanduser()
        weights = folder / WEIGHTS
        missing = [file.name for file in (folder / CONFIG, weights) if not file.is_file()]
    except (OSError, RuntimeError) as error:
        raise _refused(Path(path), reason(error)) from error
    if missing:
        raise _refused(folder, f"it has no {missing[0]}")
    config = read_json(folder / CONFIG)
    _check_kind(folder, config)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise _refused(
            folder, f"r and lora_alpha must be a whole number and a number, got {rank!r:.80} and {alpha!r:.80}"
        )
    if rank > max_rank:
        raise _refused(folder, f"its rank is {rank} and --max-lora-rank is {max_rank}")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return AdapterFiles(folder, _content(weights, scale), rank, scale)


def _check_kind(folder: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise _refused(folder, f"its peft_type is {config.get('peft_type')!r:.80}; only LORA is supported")
    if config.get("bias", "none") != "none":
        raise _refused(folder, f"it changes biases (bias: {config['bias']!r:.80})")
    for name, why in _REFUSED.items():
        if config.get(name):
            raise _refused(folder, f"{why} ({name})")
    targets = config.get("target_modules")
    if isinstance(targets, list) and (
        odd := sorted({str(name).rpartition(".")[2] for name in targets} - {*TARGETS, *FUSED, *RENAMED})
    ):
        raise _refused(folder, f"its target {odd[0]} is not one of {', '.join(TARGETS)}")


def _content(weights: Path, scale: float) -> str:
    """Return an id of the content: two adapters with one id compute the same."""
    digest = hashlib.sha256(f"lora\0{scale!r}\0".encode())
    try:
        with weights.open("rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
    except OSError as error:
        raise _refused(weights.parent, f"{weights.name}: {error.strerror or error}") from error
    return digest.hexdigest()[:32]


def _refused(folder: Path, why: str) -> ConfigError:
    return ConfigError(f"adapter {folder}: {why}", param="lora")

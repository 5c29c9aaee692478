"""Quantised checkpoints as GPTQ, AWQ, fp8 and compressed-tensors write them, and their values, by numpy alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Parts = dict[str, torch.Tensor]
Layer = Callable[[np.ndarray], tuple[Parts, np.ndarray]]
"""Of a weight [out, in]: the tensors that stand for it, by the last part of their names, and their values."""


def words(codes: np.ndarray, bits: int) -> torch.Tensor:
    """int32 words [.., n * bits / 32] of codes [.., n], the first lowest: one long number, cut into words."""
    single = (codes[..., None].astype(np.uint64) >> np.arange(bits, dtype=np.uint64)) & 1
    single = single.reshape(*codes.shape[:-1], -1, 32)
    whole = (single << np.arange(32, dtype=np.uint64)).sum(-1)
    return torch.from_numpy(whole.astype(np.uint32).view(np.int32))


def coded(weight: np.ndarray, bits: int, group: int, symmetric: bool, dtype: Any = np.float16):
    """Codes [out, in], zero points and scales [out, groups]."""
    top = (1 << bits) - 1
    groups = weight.reshape(len(weight), -1, group or weight.shape[1])
    if symmetric:
        scales = 2 * np.abs(groups).max(-1) / top
        zeros = np.full(scales.shape, (top + 1) // 2)
    else:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scales = (high - low) / top
        zeros = np.clip(np.rint(-low / scales), 0, top).astype(int)
    scales = scales.astype(dtype)
    codes = np.clip(np.rint(groups / scales.astype(np.float32)[..., None]) + zeros[..., None], 0, top)
    return codes.reshape(weight.shape).astype(np.uint8), zeros, scales


def values_of(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, index: np.ndarray) -> np.ndarray:
    """index: each input's group."""
    return (codes.astype(np.float32) - zeros[:, index]) * scales.astype(np.float32)[:, index]


def neighbours(columns: int, group: int) -> np.ndarray:
    return np.arange(columns) // (group or columns)


def gptq(bits: int, group: int, symmetric: bool, *, ordered: bool = False, second: bool = False) -> Layer:
    """second: zero points are stored as they are, not lowered by one."""

    def layer(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        index = neighbours(weight.shape[1], group)
        order = np.random.default_rng(3).permutation(weight.shape[1]) if ordered else np.arange(weight.shape[1])
        codes, zeros, scales = coded(weight[:, order], bits, group, symmetric)
        if not second:
            zeros = np.maximum(zeros, 1)
        back = np.argsort(order)
        codes, index = codes[:, back], index[back]
        parts = {
            "qweight": words(codes, bits).T,
            "qzeros": words(zeros.T - (not second), bits),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(index.astype(np.int32)),
        }
        return parts, values_of(codes, zeros, scales, index)

    return layer


def awq(group: int) -> Layer:
    def interleaved(codes: np.ndarray) -> torch.Tensor:
        eights = codes.reshape(len(codes), -1, 8)
        return words(eights[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(codes.shape), 4)

    def layer(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        codes, zeros, scales = coded(weight, 4, group, False)
        scaled = torch.from_numpy(scales.T.copy())
        parts = {"qweight": interleaved(codes.T), "qzeros": interleaved(zeros.T), "scales": scaled}
        return parts, values_of(codes, zeros, scales, neighbours(weight.shape[1], group))

    return layer


def packed(bits: int, group: int, symmetric: bool, *, ordered: bool = False) -> Layer:
    """compressed-tensors' pack-quantized."""

    def layer(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        codes, zeros, scales = coded(weight, bits, group, symmetric, np.float32)
        scaled = torch.from_numpy(scales).bfloat16()
        index = neighbours(weight.shape[1], group)
        if ordered:
            index = np.random.default_rng(4).permutation(index)
        parts = {
            "weight_packed": words(codes, bits),
            "weight_scale": scaled,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = words(zeros.T, bits).T
        if ordered:
            parts["weight_g_idx"] = torch.from_numpy(index.astype(np.int32))
        return parts, values_of(codes, zeros, scaled.float().numpy(), index)

    return layer


def int8(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
    """compressed-tensors' int-quantized, by output."""
    scales = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float32)
    codes = np.rint(weight / scales).astype(np.int8)
    parts = {"weight": torch.from_numpy(codes), "weight_scale": torch.from_numpy(scales)}
    return parts, codes * scales


def e4m3(codes: np.ndarray) -> np.ndarray:
    """Values of bytes: sign, four bits of exponent, three of mantissa; 0x7f is no number."""
    sign, power, part = np.where(codes & 0x80, -1.0, 1.0), codes >> 3 & 15, codes & 7
    return sign * np.where(power > 0, 2.0 ** (power - 7.0) * (1 + part / 8), 2.0**-6 * part / 8)


def fp8(shape: str, name: str) -> Layer:
    """shape: tensor, channel or block (of 32 x 64); name: of the scales' tensor."""

    def layer(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        rows, columns = {"tensor": weight.shape, "channel": (1, weight.shape[1]), "block": (32, 64)}[shape]
        tall, wide = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        scales = np.zeros((tall, wide), np.float32)
        for i in range(tall):
            for j in range(wide):
                part = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                scales[i, j] = np.abs(part).max() / 448
        each = scales.repeat(rows, 0)[: len(weight)].repeat(columns, 1)[:, : weight.shape[1]]
        known = e4m3(np.arange(127, dtype=np.int32))
        near = np.abs(np.abs(weight / each)[..., None] - known).argmin(-1)
        codes = (near | np.where(weight < 0, 0x80, 0)).astype(np.uint8)
        stored = torch.from_numpy(scales)
        parts = {
            "weight": torch.from_numpy(codes).view(torch.float8_e4m3fn),
            name: stored.view(()) if shape == "tensor" else stored,
        }
        return parts, e4m3(codes.astype(np.int32)) * each

    return layer


def quantise(plain: Path, quantised: Path, dequantised: Path, layer: Layer, config: dict[str, Any]) -> None:
    """Writes the dense layers of a model directory's decoder layers quantised, and with the values they then have. The
    vocabulary and, as where a config has exceptions, the last layer's down projection stay as they are."""
    tensors = load_file(plain / "model.safetensors")
    last = max(int(name.split(".layers.")[1].split(".")[0]) for name in tensors if ".layers." in name)
    written, values = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        if kind != "weight" or tensor.dim() != 2 or ".layers." not in name or stem.endswith(f"{last}.mlp.down_proj"):
            continue
        parts, same = layer(tensor.float().numpy())
        del written[name]
        written |= {f"{stem}.{part}": each.contiguous() for part, each in parts.items()}
        values[name] = torch.from_numpy(np.ascontiguousarray(same, np.float32))
    for path, each, extra in ((quantised, written, {"quantization_config": config}), (dequantised, values, {})):
        path.mkdir()
        save_file(each, path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text(json.dumps(json.loads((plain / "config.json").read_text()) | extra))

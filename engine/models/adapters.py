"""LoRA adapters of a decoder: read from PEFT's safetensors, checked against the model, and placed on its device."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvferry.engine.models.base import Computing
from kvferry.engine.models.config import DecoderConfig
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.models.interleaved import half_split
from kvferry.engine.models.tensor_names import renamed
from kvferry.engine.ranks.adapters import BY_INPUT, ShardedAdapter, joined_layers
from kvferry.engine.ranks.shard import Shard
from kvferry.engine.ranks.sharded_model import ShardedModel
from kvferry.engine.ranks.weights import Cut
from kvferry.kernels.lora import Adapter, LowRank, on_device
from kvferry.model_files.adapter import WEIGHTS, AdapterFiles
from kvferry.model_files.multimodal import text_name
from kvferry.protocol.errors import ConfigError

_TENSOR = re.compile(r"model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])(?:\.default)?\.weight")
_PREFIX = "base_model.model."

ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
"""Targets that only layers with attention have."""
_Layer = defaultdict[str, list[LowRank]]


@dataclass(frozen=True, slots=True)
class _Site:
    """Place of a target's outputs among those of a dense layer.

    layer: the dense layer (see `Layers`). first: its first output. outputs: sizes of the layers that are fused here.
    factor: folded into the weights. All sizes are of one rank, which has a part of the inputs or of the outputs."""

    layer: str
    first: int
    inputs: int
    outputs: tuple[int, ...]
    factor: float = 1.0

    @property
    def by_input(self) -> bool:
        return self.layer in BY_INPUT

    def shapes(self, rank: int, ranks: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of A and B of that rank, over all ranks."""
        of_inputs, of_outputs = (ranks, 1) if self.by_input else (1, ranks)
        return (rank, self.inputs * of_inputs), (sum(self.outputs) * of_outputs, rank)

    def part(self, whole: LowRank, shard: Shard) -> LowRank:
        if self.by_input:
            cut = Cut(1, (self.inputs * shard.ranks,))
            return replace(whole, down=cut.part(whole.down, shard).contiguous())
        cut = Cut(0, tuple(each * shard.ranks for each in self.outputs))
        return replace(whole, up=cut.part(whole.up, shard).contiguous())


def load_adapter(files: AdapterFiles, model: Computing) -> Adapter:
    """Return the adapter on the model's device, in its dtype.

    Raises ConfigError if it does not fit the model or the device's memory."""
    led = model if isinstance(model, ShardedModel) else None
    model, ranks = (model, 1) if led is None else (led.own.decoder, led.ranks)
    if not isinstance(model, Decoder):
        raise _misfit(files, "adapters need kvferry's own decoder, not transformers (--model-impl kvferry)")
    if model.config.latent is not None:
        raise _misfit(files, f"adapters of latent attention, as {model.info.name} has it, are not supported")
    count = model.config.num_layers
    found: list[list[_Layer]] = [[defaultdict(list) for _ in range(count)] for _ in range(ranks)]
    for (index, target), (down, up) in sorted(_pairs(files, model.config.model_type).items()):
        if index >= count:
            raise _misfit(files, f"it adapts layer {index}, and {model.info.name} has {count}")
        sites = _layer_sites(model.config, index)
        site = sites.get(target)
        if site is not None and target in ATTENTION and not _attends(model.config, index):
            raise _misfit(files, f"it adapts {target} of layer {index}, which has no attention in {model.info.name}")
        if site is None:
            raise _misfit(files, f"its target {target} is not one of {', '.join(sites)}")
        expected, actual = site.shapes(files.rank, ranks), (tuple(down.shape), tuple(up.shape))
        if actual != expected:
            raise _misfit(files, f"layer {index} {target} has shapes {actual}; {model.info.name} needs {expected}")
        if model.config.family.interleaved and target in ("q_proj", "k_proj"):
            half_split(up, model.config.head_dim, model.config.rope.dim)
        scaled = (up.float() * files.scale * site.factor).to(model.dtype)
        whole = LowRank(down.to(model.dtype).contiguous(), scaled.contiguous(), site.first)
        for rank, layers in enumerate(found):
            layers[index][site.layer].append(site.part(whole, Shard(rank, ranks)))
    own, *others = (tuple({name: tuple(parts) for name, parts in each.items()} for each in layers) for layers in found)
    try:
        if led is None:
            return Adapter(files.id, on_device(own, model.device))
        return ShardedAdapter(files.id, joined_layers(own, led.own.group, model.device), tuple(others))
    except torch.OutOfMemoryError as error:
        raise _misfit(files, f"it does not fit the memory of {model.device}") from error


def _layer_sites(config: DecoderConfig, index: int) -> dict[str, _Site]:
    """Return the sites of a layer. Without K/V of its own it has none for K and V; if V is K, it has only that of K."""
    if (shapes := config.shapes) is None:
        return _sites(config)
    width, dim, heads = shapes.widths[index], shapes.head_dims[index], shapes.kv_heads[index]
    own = replace(config, intermediate_size=width, head_dim=dim, num_kv_heads=heads, experts=None)
    lacking = ("k_proj", "v_proj") if shapes.shares(index) else ("v_proj",) * (not shapes.own_values[index])
    return {target: site for target, site in _sites(own).items() if target not in lacking}


def _sites(config: DecoderConfig) -> dict[str, _Site]:
    hidden, inner, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    attention = {"o_proj": _Site("o", 0, q, (hidden,), config.factors.residual)}
    q *= 1 + config.family.gated
    mlp = {"down_proj": _Site("down", 0, inner, (hidden,), config.factors.residual)}
    if config.family.fused:
        attention["qkv_proj"] = _Site("qkv", 0, hidden, (q, kv, kv))
    else:
        attention |= {
            "q_proj": _Site("qkv", 0, hidden, (q,)),
            "k_proj": _Site("qkv", q, hidden, (kv,)),
            "v_proj": _Site("qkv", q + kv, hidden, (kv,)),
        }
    if config.activation is not None:
        mlp["up_proj"] = _Site("up", 0, hidden, (inner,))
    elif config.family.fused or config.family.fused_mlp:
        mlp["gate_up_proj"] = _Site("gate_up", 0, hidden, (inner, inner))
    else:
        mlp |= {
            "gate_proj": _Site("gate_up", 0, hidden, (inner,)),
            "up_proj": _Site("gate_up", inner, hidden, (inner,)),
        }
    sites = attention | ({} if config.experts else mlp)
    if (own := config.multipliers) is not None:
        sites = {target: replace(site, factor=site.factor * own.of(target)) for target, site in sites.items()}
    return sites


def _attends(config: DecoderConfig, index: int) -> bool:
    return config.hybrid is None or config.hybrid.attends(index)


def _pairs(files: AdapterFiles, model_type: str) -> dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]:
    """Return A and B by layer and target."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Any] = load_file(files.path / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise _misfit(files, f"cannot read {WEIGHTS}: {error}") from error
    found: defaultdict[tuple[int, str], dict[str, torch.Tensor]] = defaultdict(dict)
    ours = renamed(model_type)
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(own := ours(text_name(name.removeprefix(_PREFIX))))
        if match is None and ".experts." in name:
            raise _misfit(files, f"it holds {name}, and adapters of experts are not supported")
        if match is None and ".mixer." in own:
            raise _misfit(files, f"it holds {name}, and adapters of recurrent layers are not supported")
        if match is None:
            raise _misfit(files, f"it holds {name}, which is not a low-rank part of an attention or MLP layer")
        found[int(match[1]), match[2]][match[3]] = tensor
    if not found:
        raise _misfit(files, f"{WEIGHTS} is empty")
    for (index, target), pair in found.items():
        if len(pair) < 2:
            raise _misfit(files, f"layer {index} {target} has only one of lora_A and lora_B")
    return {key: (pair["A"], pair["B"]) for key, pair in found.items()}


def _misfit(files: AdapterFiles, reason: str) -> ConfigError:
    return ConfigError(f"adapter {files.path}: {reason}", param="lora")

"""Weights of hybrid (recurrent) models in GGUF files: tensor names, and values stored in another form than ours."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import torch

from kvferry.engine.models.config import DecoderConfig
from kvferry.engine.models.weights import GGUFWeights, check_shape, missing
from kvferry.model_files.gguf import GGUFFile, GGUFTensor
from kvferry.model_files.recurrent import GatedDeltaSizes, ShortConvSizes

_MIXER = re.compile(r"model\.layers\.(\d+)\.mixer\.(.+)")
_NAMES = {
    "in_proj.weight": "ssm_in.weight",
    "in_proj.bias": "ssm_in.bias",
    "in_proj_qkvz.weight": "ssm_in.weight",
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_ba.weight": "ssm_ba.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "conv1d.bias": "ssm_conv1d.bias",
    "x_proj.weight": "ssm_x.weight",
    "dt_proj.weight": "ssm_dt.weight",
    "dt_proj.bias": "ssm_dt.bias",
    "dt_layernorm.weight": "ssm_dt_norm.weight",
    "b_layernorm.weight": "ssm_b_norm.weight",
    "c_layernorm.weight": "ssm_c_norm.weight",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
    "out_proj.bias": "ssm_out.bias",
}
"""Names of a mixer's tensors, after the layer's."""
_SHORT_CONV = {
    "in_proj.weight": "shortconv.in_proj.weight",
    "conv1d.weight": "shortconv.conv.weight",
    "out_proj.weight": "shortconv.out_proj.weight",
}
_OTHERS = {
    "model.norm.weight": ("output_norm.weight", "token_embd_norm.weight"),
    ".post_attention_layernorm.": (".post_attention_norm.", ".ffn_norm."),
    ".mlp.expert_bias": (".exp_probs_b.bias",),
}
"""Names of other tensors that differ between architectures: the decoder's, and those in files."""


class HybridGGUFWeights(GGUFWeights):
    """Weights of a hybrid model in a GGUF file. Implements `engine.models.weights.Weights`."""

    def __init__(self, file: GGUFFile, permuted_heads: tuple[int, int] | None, config: DecoderConfig) -> None:
        super().__init__(file, permuted_heads)
        short = config.hybrid is not None and isinstance(config.hybrid.sizes, ShortConvSizes)
        self._names = _SHORT_CONV if short else _NAMES
        self._dense = config.experts is None

    def read(self, name: str, out: torch.Tensor) -> None:
        super().read(name, out)
        if name.endswith(".A_log"):
            out.neg_().log_()  # files hold the rate of decay itself

    def _find(self, name: str, shape: tuple[int, ...]) -> GGUFTensor:
        mixer = _MIXER.fullmatch(name)
        stored = self._other(name) if mixer is None else f"blk.{mixer[1]}.{self._names.get(mixer[2], mixer[2])}"
        if stored is None:
            return super()._find(name.replace(".shared_mlp.", ".mlp.") if self._dense else name, shape)
        tensor = self._file.tensors.get(stored)
        if tensor is None:
            raise missing(f"{stored} ({name})")
        if math.prod(tensor.shape) == math.prod(shape):  # files leave out dimensions of one, and group norms
            tensor = replace(tensor, shape=shape)
        check_shape(stored, tensor.shape, shape)
        return tensor

    def _other(self, name: str) -> str | None:
        """Return a tensor's name if it differs between architectures, else None."""
        for ours, theirs in _OTHERS.items():
            if ours in name:
                layer = name.replace("model.layers.", "blk.")
                found = [layer.replace(ours, each) for each in theirs]
                return next((each for each in found if each in self._file.tensors), found[0])
        return None


def as_stored(file: GGUFFile, config: DecoderConfig) -> DecoderConfig:
    """Return the config of a hybrid model for the form in which its file holds weights.

    Norms include their family's offset. Qwen3.5's value heads take turns over key heads; of Qwen3-Next some files hold
    queries, keys, values and gates in one tensor by key head, others in two."""
    hybrid = config.hybrid
    if hybrid is None:
        return config
    config = replace(config, family=replace(config.family, norm_offset=0.0))
    if not isinstance(sizes := hybrid.sizes, GatedDeltaSizes):
        return config
    grouped = sizes.grouped and any(name.endswith(".ssm_in.weight") for name in file.tensors)
    sizes = replace(sizes, grouped=grouped, tiled=not sizes.paired)
    return replace(config, hybrid=replace(hybrid, sizes=sizes))


def gguf_weights(file: GGUFFile, config: DecoderConfig) -> GGUFWeights:
    """Return the weights in a file for its config."""
    heads = (config.num_heads, config.num_kv_heads) if config.family.gguf_permuted else None
    return GGUFWeights(file, heads) if config.hybrid is None else HybridGGUFWeights(file, heads, config)

"""Check that a model supports --batch-invariant (equal bits for a token in every batch)."""

from __future__ import annotations

import torch

from kvferry.engine.models.base import Model
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.ranks.layers import own_part
from kvferry.engine.ranks.sharded_model import ShardedModel
from kvferry.kernels.cpu.packed_layers import PackedLinear
from kvferry.kernels.decoder_spec import Experts
from kvferry.kernels.linear import Linear
from kvferry.kernels.mixer_spec import Lightning
from kvferry.protocol.errors import ConfigError


def require_batch_invariance(model: Model) -> None:
    """Raise ConfigError unless every operation gives a token the same bits in every batch."""
    dims, sharded = sorted(model.info.head_dims), isinstance(model, ShardedModel)
    model = model.own.decoder if isinstance(model, ShardedModel) else model
    if not isinstance(model, Decoder):
        reason = "a model of kvferry's own decoder, not of transformers (--model-impl kvferry)"
    elif model.dtype != torch.bfloat16:
        reason = "--dtype bfloat16"
    elif model.config.latent is not None:
        reason = "attention other than latent attention"
    elif any(dim % 32 or dim > 512 for dim in dims):
        reason = f"head dims that are multiples of 32 up to 512; the model's are {' and '.join(map(str, dims))}"
    elif model.config.altup is not None:
        reason = "a family without alternating updates"
    elif any(isinstance(layer.mixer, Lightning) for layer in model.parameters.layers):
        reason = "recurrent layers other than lightning attention, whose gates PyTorch computes"
    elif sharded and model.config.family.wide_qk_norm:
        reason = "norms of q and k within heads, or --tensor-parallel-size 1"
    elif any(isinstance(layer.mlp, Experts) and not _packed(layer.mlp.router) for layer in model.parameters.layers):
        reason = "a family whose routers of experts do not compute in float32"
    elif not all(map(_packed, model.dense_layers())):
        reason = "an even input width of every dense layer"
    else:
        return
    raise ConfigError(f"batch_invariant needs {reason}", param="batch_invariant")


def _packed(linear: Linear) -> bool:
    return isinstance(own_part(linear), PackedLinear)

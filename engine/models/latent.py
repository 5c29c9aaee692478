"""Loader of multi-head latent attention from DeepSeek checkpoints."""

from __future__ import annotations

import torch

from kvferry.engine.models.reader import TensorReader
from kvferry.kernels.decoder_spec import Latent
from kvferry.model_files.latent import LatentSizes


def read_latent(reader: TensorReader, sizes: LatentSizes, prefix: str) -> Latent:
    """Read the attention whose tensors have this prefix. Raises ConfigError as its reader does."""
    config, bias = reader.config, reader.config.qkv_bias
    hidden, heads = config.hidden_size, config.num_heads
    each = sizes.plain + sizes.value
    made = reader.stack([(f"{prefix}.kv_b_proj.weight", heads * each)], sizes.rank)
    of_k, of_v = torch.split(made.view(heads, each, sizes.rank), [sizes.plain, sizes.value], 1)
    ranked, name = sizes.query_rank, "q_b_proj" if sizes.query_rank else "q_proj"
    return Latent(
        q_a=reader.dense(prefix, [("q_a_proj", ranked)], hidden, bias) if ranked else None,
        q_norm=reader.norm(f"{prefix}.q_a_layernorm", ranked) if ranked else None,
        q=reader.dense(prefix, [(name, config.q_size)], ranked or hidden, False),
        kv_a=reader.dense(prefix, [("kv_a_proj_with_mqa", sizes.cached)], hidden, bias),
        kv_norm=reader.norm(f"{prefix}.kv_a_layernorm", sizes.rank),
        expand=reader.ops.linear(made),
        absorb=reader.ops.linear_of_heads(of_k.transpose(1, 2)),
        up_v=reader.ops.linear_of_heads(of_v),
        o=reader.dense(prefix, [("o_proj", hidden)], heads * sizes.value, config.o_bias),
        rotated=sizes.rotated,
        plain=sizes.plain,
        rank=sizes.rank,
        value=sizes.value,
    )

"""Shapes of random recurrent models: sizes of published models, and the tensors of their layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Fields = dict[str, float | int | bool | list[int]]
Sizes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder. attention: layers that attend; all others are recurrent. group: layers' tensors by kind."""

    architecture: str
    vocabulary: int
    hidden: int
    layers: int
    attention: tuple[int, ...]
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    fields: Fields
    recurrent: Sizes
    norms: tuple[str, str]
    final_norm: str = "output_norm"
    queries: int = 1
    """Outputs of `attn_q` by head and dim: 2 where a gate lies behind each query."""
    qk_norm: bool = True


def _delta(hidden: int, heads: int, dim: int, width: int) -> Sizes:
    """Return the tensors of Qwen3.5's layers, whose keys and values have as many heads."""
    values = heads * dim
    return {
        "attn_qkv.weight": (3 * values, hidden),
        "attn_gate.weight": (values, hidden),
        "ssm_conv1d.weight": (3 * values, width),
        "ssm_beta.weight": (heads, hidden),
        "ssm_alpha.weight": (heads, hidden),
        "ssm_a": (heads,),
        "ssm_dt.bias": (heads,),
        "ssm_norm.weight": (dim,),
        "ssm_out.weight": (hidden, values),
    }


def _convolution(hidden: int, width: int) -> Sizes:
    """Return the tensors of LFM2's layers."""
    return {
        "shortconv.in_proj.weight": (3 * hidden, hidden),
        "shortconv.conv.weight": (hidden, width),
        "shortconv.out_proj.weight": (hidden, hidden),
    }


def _scan(hidden: int, heads: int, dim: int, state: int, width: int) -> Sizes:
    """Return the tensors of Granite 4's layers, which have one group."""
    inner, channels = heads * dim, heads * dim + 2 * state
    return {
        "ssm_in.weight": (inner + channels + heads, hidden),
        "ssm_conv1d.weight": (channels, width),
        "ssm_conv1d.bias": (channels,),
        "ssm_a": (heads, 1),
        "ssm_d": (heads, 1),
        "ssm_dt.bias": (heads,),
        "ssm_norm.weight": (1, inner),
        "ssm_out.weight": (hidden, inner),
    }


SHAPES = {
    "qwen3.5-0.8b": Shape(
        architecture="qwen35",
        vocabulary=248320,
        hidden=1024,
        layers=24,
        attention=tuple(range(3, 24, 4)),
        inner=3584,
        heads=8,
        kv_heads=2,
        head_dim=256,
        fields={
            "rope.freq_base": 1e7,
            "rope.dimension_count": 64,
            "rope.dimension_sections": [11, 11, 10, 0],
            "ssm.conv_kernel": 4,
            "ssm.state_size": 128,
            "ssm.group_count": 16,
            "ssm.time_step_rank": 16,
            "ssm.inner_size": 2048,
            "full_attention_interval": 4,
        },
        recurrent=_delta(1024, 16, 128, 4),
        norms=("attn_norm", "post_attention_norm"),
        queries=2,
    ),
    "lfm2.5-1.2b": Shape(
        architecture="lfm2",
        vocabulary=65536,
        hidden=2048,
        layers=16,
        attention=(2, 5, 8, 10, 12, 14),
        inner=8192,
        heads=32,
        kv_heads=8,
        head_dim=64,
        fields={"rope.freq_base": 1e6, "shortconv.l_cache": 3},
        recurrent=_convolution(2048, 3),
        norms=("attn_norm", "ffn_norm"),
        final_norm="token_embd_norm",
    ),
    "granite4-1.1b": Shape(  # 28 of the 40 layers of Granite 4.0 H 1B
        architecture="granitehybrid",
        vocabulary=100352,
        hidden=1536,
        layers=28,
        attention=(5, 15, 25),
        inner=4096,
        heads=12,
        kv_heads=4,
        head_dim=128,
        fields={
            "rope.freq_base": 1e4,
            "rope.dimension_count": 128,
            "rope.scaling.finetuned": False,
            "embedding_scale": 12.0,
            "residual_scale": 0.22,
            "attention.scale": 0.0078125,
            "logit_scale": 6.0,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 128,
            "ssm.group_count": 1,
            "ssm.time_step_rank": 48,
            "ssm.inner_size": 3072,
        },
        recurrent=_scan(1536, 48, 64, 128, 4),
        norms=("attn_norm", "ffn_norm"),
        qk_norm=False,
    ),
}
"""Shapes by the names that `--random` takes."""


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor, in the order of the layers."""
    hidden, width = shape.hidden, shape.kv_heads * shape.head_dim
    attention: Sizes = {
        "attn_q.weight": (shape.queries * shape.heads * shape.head_dim, hidden),
        "attn_k.weight": (width, hidden),
        "attn_v.weight": (width, hidden),
        "attn_output.weight": (hidden, shape.heads * shape.head_dim),
    }
    if shape.qk_norm:
        attention |= {"attn_q_norm.weight": (shape.head_dim,), "attn_k_norm.weight": (shape.head_dim,)}
    rest: Sizes = {f"{name}.weight": (hidden,) for name in shape.norms}
    rest |= {f"ffn_{name}.weight": (shape.inner, hidden) for name in ("gate", "up")}
    rest["ffn_down.weight"] = (hidden, shape.inner)
    yield "token_embd.weight", (shape.vocabulary, hidden)
    for layer in range(shape.layers):
        for name, sizes in ((attention if layer in shape.attention else shape.recurrent) | rest).items():
            yield f"blk.{layer}.{name}", sizes
    yield f"{shape.final_norm}.weight", (hidden,)

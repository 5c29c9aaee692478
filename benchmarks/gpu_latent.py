"""Subjects of the GPU kernel benchmark: latent attention at DeepSeek's sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from benchmarks.gpu_subject import Shape, Subject, layers_for, paged_plan
from kvferry.kernels.decoder_spec import Latent
from kvferry.kernels.latent import absorbed, expanded, project_out
from kvferry.kernels.ops import Ops
from kvferry.kernels.quantised_cache import dequantise, quantise, vector_width
from kvferry.kernels.torch_operations import TorchLinear, TorchLinearOfHeads

ROTATED, PLAIN, RANK, VALUE = 64, 128, 512, 128


def weights(shape: Shape) -> Latent:
    """Return random weights of the products inside latent attention."""
    each = torch.randn(shape.heads, PLAIN + VALUE, RANK, dtype=shape.dtype, device=shape.device) * RANK**-0.5
    none = TorchLinear(each[0], None)
    return Latent(
        q_a=None, q_norm=None, q=none, kv_a=none, kv_norm=each[0, 0], o=none,
        expand=TorchLinear(each.flatten(0, 1), None),
        absorb=TorchLinearOfHeads(each[:, :PLAIN].transpose(1, 2)),
        up_v=TorchLinearOfHeads(each[:, PLAIN:]),
        rotated=ROTATED, plain=PLAIN, rank=RANK, value=VALUE,
    )  # fmt: skip


def latent_attention(
    ops: Ops, shape: Shape, seqs: int, query_len: int, computed_len: int, cache: torch.dtype | None = None
) -> Subject:
    """Return latent attention of equal sequences, with its products into and out of the latent space.

    The peer reads the same latents, contiguous."""
    total, itemsize, own = computed_len + query_len, shape.dtype.itemsize, weights(shape)
    vectors, tokens, of_head = seqs * total, seqs * query_len, ROTATED + PLAIN + VALUE
    made = shape.heads * RANK * (PLAIN + VALUE)
    cached = vectors * vector_width(ROTATED + RANK, cache or shape.dtype) * (cache or shape.dtype).itemsize
    moved = cached + itemsize * (made + tokens * shape.heads * of_head)
    pairs = seqs * (query_len * computed_len + query_len * (query_len + 1) // 2)
    if decodes := query_len == 1:
        work = 2 * shape.heads * pairs * (ROTATED + 2 * RANK) + 2 * made * tokens
    else:
        work = 2 * shape.heads * pairs * of_head + 2 * made * vectors
    what = "decode" if decodes else "prefill"
    layers = layers_for(moved)
    plan, blocks = paged_plan([query_len] * seqs, [total] * seqs, shape)
    random: dict[str, Any] = {"dtype": shape.dtype, "device": shape.device}
    pool = torch.randn(blocks, layers, 1, 1, shape.block_size, ROTATED + RANK, **random)
    q = torch.randn(tokens, shape.heads, ROTATED + PLAIN, **random)
    scale = (ROTATED + PLAIN) ** -0.5
    if cache is not None:
        pool = quantise(pool, cache)
    table = plan.block_table.long()
    plain = pool if cache is None else dequantise(pool, shape.dtype)
    lying = [plain[:, layer, 0, 0][table].flatten(1, 2)[:, :total].contiguous() for layer in range(layers)]
    return Subject(
        title=f"latent {what} {seqs} x {query_len} at {computed_len}{', fp8' * bool(cache)}",
        ours=lambda layer: ops.latent_attention(q, pool[:, layer], plan, scale, own),
        peer=(_decode if decodes else _prefill)(q, lying, own, scale),
        layers=layers,
        moved=moved,
        work=work,
    )


def _decode(q: torch.Tensor, lying: list[torch.Tensor], own: Latent, scale: float) -> Callable[[int], torch.Tensor]:
    def run(layer: int) -> torch.Tensor:
        kv = lying[layer][:, None]
        summed = F.scaled_dot_product_attention(absorbed(q, own)[:, None], kv, kv, scale=scale)
        return project_out(summed[:, 0], own)

    return run


def _prefill(q: torch.Tensor, lying: list[torch.Tensor], own: Latent, scale: float) -> Callable[[int], torch.Tensor]:
    seqs, total = lying[0].shape[:2]
    queries = q.view(seqs, -1, *q.shape[1:]).transpose(1, 2).contiguous()
    mask = causal_lower_right(queries.shape[2], total)

    def run(layer: int) -> torch.Tensor:
        k, v = (torch.stack(each) for each in zip(*(expanded(one, own) for one in lying[layer]), strict=True))
        out = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=scale)[..., : own.value]
        return out.transpose(1, 2).reshape(*q.shape[:2], own.value)

    return run

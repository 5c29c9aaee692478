"""Reference backend in plain PyTorch: attention, rotation, norm and gate; the rest is in torch_operations.

All other backends are tested against it.

`BatchIndex` builds the tensors that depend on the batch alone (gather indices, masks, rows of the rotary tables) at the
first layer that needs them; all other layers reuse them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvferry.kernels.batch_index import AttentionGroup, BatchIndex, block_rows
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.decoder_spec import Latent
from kvferry.kernels.gate_spec import SILU, Gate
from kvferry.kernels.latent import absorbed, expanded, expands, project_out
from kvferry.kernels.quantised_cache import PEAKS, as_bytes, dequantise, quantise
from kvferry.kernels.torch_operations import TorchShared


class ReferenceOps(TorchShared):
    """Implements `kernels.ops.Ops` on any device, in float32, bfloat16 and float16.

    Holds the last batch's indices, one for each geometry of layers; not thread-safe."""

    name = "reference"

    def __init__(self) -> None:
        self._batch: object = None
        self._indices: dict[tuple[int, tuple[int, ...], tuple[int, ...]], BatchIndex] = {}

    def _prepared(self, plan: BatchPlan, kv_layer: torch.Tensor) -> BatchIndex:
        if plan.batch is not self._batch:
            self._batch, self._indices = plan.batch, {}
        geometry = id(plan), kv_layer.shape[1:], kv_layer.stride()
        index = self._indices.get(geometry)
        if index is None:
            index = self._indices[geometry] = BatchIndex(plan, kv_layer)
        return index

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def gate_mul(self, gate_up: torch.Tensor, gate: Gate = SILU) -> torch.Tensor:
        if gate == SILU:
            return F.silu(gate_up[:, : gate_up.shape[1] // 2]) * gate_up[:, gate_up.shape[1] // 2 :]
        g, up = gate_up.float().chunk(2, dim=-1)
        g, up = g.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
        return (g * torch.sigmoid(gate.slope * g + gate.cubic * g**3) * (up + gate.offset)).to(gate_up.dtype)

    def rope_and_cache(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        kv_layer: torch.Tensor,
        plan: BatchPlan,
    ) -> torch.Tensor:
        index = self._prepared(plan, kv_layer)
        if k is None:
            return q if cos is None or sin is None else _rotate(q, *index.rope(cos, sin))
        if cos is not None and sin is not None:
            turn = index.rope(cos, sin)
            if q.shape[2] == k.shape[2]:
                both = _rotate(torch.cat((q, k), 1), *turn)
                q, k = both[:, : q.shape[1]], both[:, q.shape[1] :]
            else:
                q, k = _rotate(q, *turn), _rotate(k, *turn)
        dtype, slots = kv_layer.dtype, block_rows(as_bytes(kv_layer)).view(-1, index.vector)
        for rows, each in zip(index.write_rows, (k,) if v is None else (k, v), strict=True):
            each = each if index.written is None else each[index.written]
            stored = as_bytes(quantise(each, dtype)) if dtype in PEAKS else each
            slots.index_copy_(0, rows, stored.reshape(-1, index.vector))
        return q

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        plan: BatchPlan,
        scale: float,
        window: int = 0,
        cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        groups = self._prepared(plan, kv_layer).groups(window, q.dtype)
        memory = block_rows(as_bytes(kv_layer))
        if len(groups) == 1:
            return _attend(q, memory, kv_layer, groups[0], scale, cap, sinks)
        out = torch.empty_like(q)
        for group in groups:
            out[group.tokens] = _attend(q[group.tokens], memory, kv_layer, group, scale, cap, sinks)
        return out

    def latent_attention(
        self, q: torch.Tensor, kv_layer: torch.Tensor, plan: BatchPlan, scale: float, own: Latent
    ) -> torch.Tensor:
        memory = block_rows(as_bytes(kv_layer))
        out = q.new_empty(*q.shape[:2], own.value)
        for group in self._prepared(plan, kv_layer).groups(0, q.dtype):
            queries = q[group.tokens]
            if group.count == 1 and expands(len(queries), group.length, own):
                k, v = expanded(_gathered(memory, kv_layer, group, q.dtype)[0, 0, 0], own)
                mixed = _weighed(queries.transpose(0, 1)[None], k[None], v[None], group, scale, 0.0, None)
                out[group.tokens] = mixed[0, ..., : own.value].transpose(0, 1)
            else:
                summed = _attend(absorbed(queries, own), memory, kv_layer, group, scale, 0.0, None)
                out[group.tokens] = project_out(summed, own)
        return out


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x [T, heads, dim] with its first rotary_dim dims rotated (half-split) in float32, rounded once."""
    half, rotary_dim = cos.shape[-1] // 2, cos.shape[-1]
    swapped = torch.cat((x[..., half:rotary_dim], x[..., :half]), -1)
    turned = (x[..., :rotary_dim] * cos).addcmul_(swapped, sin).to(x.dtype)
    return turned if rotary_dim == x.shape[-1] else torch.cat((turned, x[..., rotary_dim:]), -1)


def _attend(
    q: torch.Tensor,
    memory: torch.Tensor,
    kv_layer: torch.Tensor,
    group: AttentionGroup,
    scale: float,
    cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return attention [n, heads, dim] of the group's queries q [n, heads, dim].

    Heads that share a K/V head are the queries (decode) or the heads (prefill) of one SDPA batch entry, so K/V is never
    repeated."""
    kv_heads = kv_layer.shape[2]
    n, heads, dim = q.shape
    kv = _gathered(memory, kv_layer, group, q.dtype)
    k, v = kv[0], kv[-1]
    sinks = None if sinks is None else sinks.view(kv_heads, -1, 1)
    if group.count == n and not group.causal:
        out = _weighed(q.view(n, kv_heads, -1, dim), k, v, group, scale, cap, sinks)
        return out.reshape(n, heads, dim)
    k, v = (x.transpose(0, 1).expand(-1, heads // kv_heads, -1, -1) for x in (k, v))
    q = q.transpose(0, 1).view(kv_heads, -1, n, dim)
    out = _weighed(q, k, v, group, scale, cap, None if sinks is None else sinks[..., None])
    return out.reshape(heads, n, dim).transpose(0, 1)


def _gathered(memory: torch.Tensor, kv_layer: torch.Tensor, group: AttentionGroup, dtype: torch.dtype) -> torch.Tensor:
    """Return the group's cached vectors, [planes, count, kv_heads, length, dim], in `dtype` if they are in 8 bits."""
    _, planes, kv_heads, _, width = kv_layer.shape
    gathered = memory.index_select(0, group.rows)
    if group.unseen is not None:
        gathered.view(-1, width).index_fill_(0, group.unseen, 0)
    kv = gathered.view(planes, group.count, kv_heads, -1, width)[:, :, :, : group.length]
    return dequantise(kv.view(kv_layer.dtype), dtype) if kv_layer.dtype in PEAKS else kv


def _weighed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: AttentionGroup,
    scale: float,
    cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return attention of q [.., queries, dim] over k and v [.., positions, dim] under the group's mask.

    sinks: broadcast to scores [.., queries, positions] except their last dimension."""
    if not cap and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, is_causal=group.causal, scale=scale)
    scores = (q.float() @ k.float().transpose(-1, -2)).mul_(scale)
    if cap:
        scores.div_(cap).tanh_().mul_(cap)
    if group.causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1), float("-inf"))
    elif group.mask is not None:
        scores += group.mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1).softmax(-1)[..., :-1]
        return (scores @ v.float()).to(q.dtype)
    return (scores.softmax(-1) @ v.float()).to(q.dtype)

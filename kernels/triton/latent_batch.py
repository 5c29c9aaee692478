"""LatentBatch: attention over cached latents (MLA) on Triton; absorbed for decodes, expanded for chunks.

Decodes and short chunks attend in latent space, token by token. Longer chunks attend to expanded keys and values, for
as many heads at once as MAX_BYTES allows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.decoder_spec import Latent
from kvferry.kernels.latent import expanded, expands
from kvferry.kernels.quantised_cache import PEAKS, as_bytes, dequantise
from kvferry.kernels.torch_operations import TorchLinear
from kvferry.kernels.triton.device_features import on_amd
from kvferry.kernels.triton.latent import sum_latents
from kvferry.kernels.triton.prefill import prefill
from kvferry.kernels.triton.split_kv import Division
from kvferry.kernels.triton.tile_sizes import LATENT_PARTS, Tile, amd_tile, latent_tile, prefill_tile, spare_parts
from kvferry.protocol.layout import blocks_for

MAX_BYTES = 512 << 20
"""Limit of expanded keys and values in memory, but at least one head's. Intermediate results take up to twice that."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens that attend in latent space, one row each.

    tokens: of the batch. table: int32 [rows, blocks]. division: of the rows' visible positions."""

    tokens: slice | torch.Tensor
    table: torch.Tensor
    division: Division
    tile: Tile


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks that attend over expanded keys and values.

    tokens: int64, of the batch. blocks: int64, of the pool, in order. plan: of these tokens over the expansion of those
    blocks."""

    tokens: torch.Tensor
    blocks: torch.Tensor
    plan: BatchPlan
    tile: Tile


class LatentBatch:
    """Latent attention of one plan, for layers of one form.

    element_bytes: of queries. processors: multiprocessors to fill."""

    def __init__(self, plan: BatchPlan, own: Latent, heads: int, element_bytes: int, processors: int) -> None:
        self.plan = plan
        lens = zip(plan.query_lens, plan.total_lens, strict=True)
        made = [s for s, each in enumerate(lens) if s >= plan.num_decodes and expands(*each, own)]
        others = [s for s in range(plan.num_seqs) if s not in made]
        width = max(own.rotated + own.plain, own.value)
        self.chunks = _chunks(plan, made, width, element_bytes) if made else None
        self.tokens = None
        if others:
            tile = latent_tile(own.rank, element_bytes)
            tile = amd_tile(tile, element_bytes) if on_amd(plan.positions.device) else tile
            tokens, table, total_len = _tokens(plan, others)
            division = Division(total_len, tile.keys, spare_parts(-(-heads // tile.rows), processors, LATENT_PARTS))
            self.tokens = Tokens(tokens, table, division, tile)

    def attend(self, q: torch.Tensor, kv_layer: torch.Tensor, scale: float, own: Latent) -> torch.Tensor:
        """Implement `Ops.latent_attention`."""
        tokens, chunks = self.tokens, self.chunks
        if chunks is None and tokens is not None and isinstance(tokens.tokens, slice):
            return _in_their_space(q, kv_layer, tokens, scale, own)
        out = q.new_empty(*q.shape[:2], own.value)
        if tokens is not None:
            out[tokens.tokens] = _in_their_space(q[tokens.tokens], kv_layer, tokens, scale, own)
        if chunks is not None:
            out[chunks.tokens] = _over_made(q[chunks.tokens], kv_layer, chunks, scale, own)
        return out


def _in_their_space(q: torch.Tensor, kv_layer: torch.Tensor, tokens: Tokens, scale: float, own: Latent) -> torch.Tensor:
    turned, plain = torch.split(q, [own.rotated, own.plain], -1)
    absorbed = own.absorb(plain)
    summed = sum_latents(turned, absorbed, kv_layer, tokens.table, scale, tokens.division, tokens.tile)
    return own.up_v(summed)


def _over_made(q: torch.Tensor, kv_layer: torch.Tensor, chunks: Chunks, scale: float, own: Latent) -> torch.Tensor:
    latents = as_bytes(kv_layer)[chunks.blocks, 0, 0].view(kv_layer.dtype)
    latents = dequantise(latents, q.dtype) if kv_layer.dtype in PEAKS else latents
    out = q.new_empty(*q.shape[:2], own.value)
    at_once = heads_at_once(latents.shape[0] * latents.shape[1], q, own)
    for first in range(0, q.shape[1], at_once):
        heads = slice(first, first + at_once)
        out[:, heads] = _of_heads(q[:, heads], latents, chunks, scale, own, first)
    return out


def heads_at_once(positions: int, q: torch.Tensor, own: Latent) -> int:
    """Return for how many heads the keys and values of `positions` positions are expanded at once."""
    heads = q.shape[1]
    each = positions * 2 * max(own.rotated + own.plain, own.value) * q.element_size()
    parts = -(-heads // max(1, MAX_BYTES // each))
    return -(-heads // parts)


def _of_heads(
    q: torch.Tensor, latents: torch.Tensor, chunks: Chunks, scale: float, own: Latent, first: int
) -> torch.Tensor:
    """Return [T, heads, value] of consecutive heads from `first` on. latents: [blocks, slots, rotated + rank]."""
    (heads, each), slots = (q.shape[1], own.plain + own.value), latents.shape[1]
    assert isinstance(own.expand, TorchLinear)
    k, v = expanded(latents.flatten(0, 1), own, own.expand.part(first * each, (first + heads) * each))
    width = max(k.shape[2], v.shape[2])
    kv = torch.stack([F.pad(made, (0, width - made.shape[2])) for made in (k, v)])
    pages = kv.view(2, heads, -1, slots, width).permute(2, 0, 1, 3, 4)
    q = F.pad(q, (0, width - q.shape[2]))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    prefill(q, pages, out, chunks.plan, scale, 0, 0.0, None, max(chunks.plan.query_lens), chunks.tile)
    return out[..., : own.value]


def _tokens(plan: BatchPlan, seqs: list[int]) -> tuple[slice | torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each query token of the sequences, its row of the table, and how many positions it sees."""
    if len(seqs) == plan.num_decodes == plan.num_seqs:
        return slice(0, plan.num_decodes), plan.block_table, plan.total_len
    tokens, rows = _queries(plan, seqs)
    return tokens, plan.block_table[rows], (plan.positions[tokens] + 1).int()


def _chunks(plan: BatchPlan, seqs: list[int], width: int, element_bytes: int) -> Chunks:
    tokens, _ = _queries(plan, seqs)
    device, query_lens = plan.positions.device, [plan.query_lens[s] for s in seqs]
    counts = [blocks_for(plan.total_lens[s], plan.block_size) for s in seqs]
    starts = torch.tensor([0, *counts]).cumsum(0)
    table = starts[:-1, None] + torch.arange(max(counts))
    own = replace(
        plan,
        positions=plan.positions[tokens],
        slots=plan.slots[tokens],
        block_table=table.int().to(device),
        query_start=torch.tensor([0, *query_lens]).cumsum(0).int().to(device),
        total_len=plan.total_len[torch.tensor(seqs, device=device)],
        query_lens=tuple(query_lens),
        total_lens=tuple(plan.total_lens[s] for s in seqs),
        num_decodes=0,
    )
    blocks = torch.cat([plan.block_table[s, :count] for s, count in zip(seqs, counts, strict=True)])
    tile = prefill_tile(max(query_lens), width, element_bytes)
    return Chunks(tokens, blocks.long(), own, amd_tile(tile, element_bytes) if on_amd(device) else tile)


def _queries(plan: BatchPlan, seqs: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequences' query tokens and the sequence of each, int64."""
    starts = torch.tensor([0, *plan.query_lens]).cumsum(0).tolist()
    tokens = torch.cat([torch.arange(starts[s], starts[s + 1]) for s in seqs])
    rows = torch.tensor(seqs).repeat_interleave(torch.tensor([plan.query_lens[s] for s in seqs]))
    return tokens.to(plan.positions.device), rows.to(plan.positions.device)

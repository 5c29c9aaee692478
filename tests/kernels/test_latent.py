"""Latent attention of every row of the table against keys and values written out, in both of its forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvferry.kernels import latent
from kvferry.kernels.cpu import CpuOps, instruction_sets
from kvferry.kernels.decoder_spec import Latent
from kvferry.kernels.ops import Ops
from kvferry.kernels.quantised_cache import FP8, dequantise, quantise, vector_width
from kvferry.kernels.reference import ReferenceOps
from tests.kernels.paged_batch import LAYER, close, make_plan, moved, rope_table, rotate_complex

ROTATED, PLAIN, RANK, VALUE = 64, 128, 512, 128
HEADS, LAYERS, SLOTS = 3, 2, 16
SCALE = (ROTATED + PLAIN) ** -0.5
ROWS = ["reference", *instruction_sets()]
BATCHES = {
    "decodes": ((1, 1, 1), (1, 40, 300), 3),
    "prompts": ((50, 17), (50, 17), 0),
    "chunks of prompts": ((40, 3, 30), (200, 161, 61), 0),
    "decodes and a prompt": ((1, 1, 150), (40, 900, 150), 2),
    "one prompt": ((300,), (300,), 0),
    "all": ((1, 1, 33, 3, 20), (25, 90, 33, 70, 80), 2),
}
OTHERS = {
    "long": ((5, 70, 130), (2100, 2070, 2060), 0),
    "many decodes": ((1,) * 60, (5, 300, *range(1, 59)), 60),
}
"""Chunks behind more positions than are expanded at a time, of which the first is cheaper absorbed; more rows than have
their partial results at once."""


def ops_of(row: str) -> Ops:
    return ReferenceOps() if row == "reference" else CpuOps(2, row)


def weights(dtype: torch.dtype, heads: int = HEADS) -> torch.Tensor:
    """Of K and V of each head, [heads, plain + value, rank]."""
    shape = (heads, PLAIN + VALUE, RANK)
    return (torch.randn(shape, generator=torch.Generator().manual_seed(2)) * RANK**-0.5).to(dtype)


def made(ops: Ops, dtype: torch.dtype, device: str = "cpu", heads: int = HEADS) -> Latent:
    each = weights(dtype, heads).to(device)
    none = ops.linear(torch.zeros(2, 2, dtype=dtype))
    return Latent(
        q_a=None, q_norm=None, q=none, kv_a=none, kv_norm=torch.ones(RANK), o=none,
        expand=ops.linear(each.flatten(0, 1)),
        absorb=ops.linear_of_heads(each[:, :PLAIN].transpose(1, 2)),
        up_v=ops.linear_of_heads(each[:, PLAIN:]),
        rotated=ROTATED, plain=PLAIN, rank=RANK, value=VALUE,
    )  # fmt: skip


class Case:
    """A pool of garbage, the sequences in it, and queries."""

    def __init__(self, batch: str, dtype: torch.dtype, heads: int = HEADS, cache: torch.dtype | None = None) -> None:
        self.heads = heads
        query_lens, total_lens, decodes = (BATCHES | OTHERS)[batch]
        self.plan, blocks = make_plan(query_lens, total_lens, decodes, SLOTS, 0)
        numbers = torch.Generator().manual_seed(1)
        shape = (blocks, LAYERS, 1, 1, SLOTS, vector_width(ROTATED + RANK, cache or dtype))
        self.pool = torch.full(shape, float("nan"), dtype=dtype)
        if cache is not None:
            self.pool = torch.full(shape, -1, dtype=torch.int8).view(cache)
        given = [torch.randn(total, ROTATED + RANK, generator=numbers).to(dtype) for total in total_lens]
        stored = given if cache is None else [quantise(each, cache) for each in given]
        self.cached = given if cache is None else [dequantise(each, torch.float32) for each in stored]
        for table, vectors in zip(self.plan.block_table, stored, strict=True):
            for position, vector in enumerate(vectors):
                self.pool[int(table[position // SLOTS]), LAYER, 0, 0, position % SLOTS] = vector
        self.q = torch.randn(sum(query_lens), heads, ROTATED + PLAIN, generator=numbers).to(dtype)

    def to(self, device: str) -> None:
        self.plan, self.pool, self.q = moved(self.plan, device), self.pool.to(device), self.q.to(device)

    def wanted(self, dtype: torch.dtype) -> torch.Tensor:
        """float64 [T, heads, value]."""
        out, of_k, of_v = [], *torch.split(weights(dtype, self.heads).double(), [PLAIN, VALUE], 1)
        queries = self.q.double().split(list(self.plan.query_lens))
        for q, cached in zip(queries, self.cached, strict=True):
            key, c = torch.split(cached.double(), [ROTATED, RANK], 1)
            scores = torch.einsum("thd,ld->htl", q[..., :ROTATED], key)
            scores += torch.einsum("thd,hdr,lr->htl", q[..., ROTATED:], of_k, c)
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(cached) - len(q) + 1)
            shares = (scores * SCALE).masked_fill(hidden, float("-inf")).softmax(-1)
            out.append(torch.einsum("htl,lr,hvr->thv", shares, c, of_v))
        return torch.cat(out)

    def run(self, ops: Ops, dtype: torch.dtype) -> torch.Tensor:
        return ops.latent_attention(self.q, self.pool[:, LAYER], self.plan, SCALE, made(ops, dtype, heads=self.heads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("row", ROWS)
def test_equals_keys_and_values_of_each_head(row: str, batch: str, dtype: torch.dtype) -> None:
    case = Case(batch, dtype)
    close(case.run(ops_of(row), dtype), case.wanted(dtype), dtype)


@pytest.mark.parametrize("cache", [FP8, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row", ROWS)
def test_latents_in_8_bits(row: str, dtype: torch.dtype, cache: torch.dtype) -> None:
    case = Case("all", dtype, cache=cache)
    close(case.run(ops_of(row), dtype), case.wanted(dtype), dtype)


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("batch", BATCHES)
def test_both_forms_are_the_same(batch: str, expanded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.kernels.reference.expands", lambda *_: expanded)
    case = Case(batch, torch.float32)
    close(case.run(ReferenceOps(), torch.float32), case.wanted(torch.float32), torch.float32)


def test_the_cheaper_form_is_taken() -> None:
    """A prompt is expanded, a decode is not, and neither are a few tokens behind a long prefix."""
    own = made(ReferenceOps(), torch.float32)
    chosen = {lens: latent.expands(*lens, own) for lens in ((512, 512), (512, 4096), (1, 4096), (16, 4096), (1, 2))}
    assert [lens for lens, expands in chosen.items() if expands] == [(512, 512), (512, 4096)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row", ROWS)
def test_the_shared_key_is_rotated_and_one_vector_a_token_is_written(row: str, dtype: torch.dtype) -> None:
    plan, blocks = make_plan((1, 1, 33), (25, 90, 40), 2, SLOTS, 0)
    pool = torch.zeros(blocks, LAYERS, 1, 1, SLOTS, ROTATED + RANK, dtype=dtype)
    numbers = torch.Generator().manual_seed(9)
    q = torch.randn(plan.num_tokens, HEADS, ROTATED + PLAIN, generator=numbers).to(dtype)
    k = torch.randn(plan.num_tokens, 1, ROTATED + RANK, generator=numbers).to(dtype)
    turned = ops_of(row).rope_and_cache(q, k, None, *rope_table(400, ROTATED), pool[:, LAYER], plan)
    close(turned, rotate_complex(q, plan.positions, ROTATED), dtype)
    block, slot = plan.slots // SLOTS, plan.slots % SLOTS
    close(pool[block, LAYER, 0, 0, slot], rotate_complex(k, plan.positions, ROTATED)[:, 0], dtype)
    assert int(pool.any(-1).sum()) == plan.num_tokens
    elsewhere = torch.where(torch.arange(plan.num_tokens) % 3 > 0, -plan.slots - 1, plan.slots)
    before, unwritten = pool.clone(), replace(plan, slots=elsewhere)
    again = ops_of(row).rope_and_cache(q, 2 * k, None, *rope_table(400, ROTATED), pool[:, LAYER], unwritten)
    assert torch.equal(again, turned)
    written = torch.arange(plan.num_tokens) % 3 == 0
    close(pool[block, LAYER, 0, 0, slot][written], 2 * rotate_complex(k, plan.positions, ROTATED)[written, 0], dtype)
    assert int((pool != before).any(-1).sum()) == int(written.sum())

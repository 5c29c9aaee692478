"""Subjects of the CPU kernel benchmark: latent attention at DeepSeek's sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvferry.kernels.batch_plan import BatchPlan

if TYPE_CHECKING:
    import torch

    from kvferry.kernels.cpu import CpuOps
    from kvferry.kernels.decoder_spec import Latent

ROTATED, PLAIN, RANK, VALUE = 64, 128, 512, 128
HEADS = {"V2-Lite": 16, "V3": 128}
CHUNKS = ((512, 512), (512, 4096), (16, 4096), (1, 4096))
Subject = tuple[str, Callable[[], "torch.Tensor"], Callable[[], "torch.Tensor"], float, float]
"""Title, our form, the reference's form, bytes of weights and cache, twice the products of the cheaper form."""


def weights(ops: CpuOps, heads: int) -> Latent:
    """Return random weights of the products inside latent attention."""
    import torch

    from kvferry.kernels.decoder_spec import Latent

    each = (torch.randn(heads, PLAIN + VALUE, RANK) * RANK**-0.5).bfloat16()
    none = ops.linear(torch.zeros(2, 2, dtype=torch.bfloat16))
    return Latent(
        q_a=None, q_norm=None, q=none, kv_a=none, kv_norm=each[0, 0], o=none,
        expand=ops.linear(each.flatten(0, 1)),
        absorb=ops.linear_of_heads(each[:, :PLAIN].transpose(1, 2)),
        up_v=ops.linear_of_heads(each[:, PLAIN:]),
        rotated=ROTATED, plain=PLAIN, rank=RANK, value=VALUE,
    )  # fmt: skip


def latent_subjects(
    ops: CpuOps,
    plan_of: Callable[[int, int, int], tuple[BatchPlan, int]],
    pool_of: Callable[[int, int, int, int, int], torch.Tensor],
) -> Iterator[Subject]:
    """Yield the subjects.

    plan_of: takes query tokens, total tokens and sequences and returns (plan, blocks of the pool); pool_of: takes
    blocks, layers, heads, head dim and planes."""
    import torch

    from kvferry.kernels.latent import expands
    from kvferry.kernels.reference import ReferenceOps

    reference, scale = ReferenceOps(), (ROTATED + PLAIN) ** -0.5
    for name, heads in HEADS.items():
        own = weights(ops, heads)
        for queries, total in CHUNKS:
            plan, blocks = plan_of(queries, total, 1)
            pool = pool_of(blocks, 1, 1, ROTATED + RANK, 1)[:, 0]
            q = torch.randn(queries, heads, ROTATED + PLAIN).bfloat16()
            pairs = queries * (queries + 1) / 2 + queries * (total - queries)
            if expands(queries, total, own):
                work = pairs * (ROTATED + PLAIN + VALUE) + total * RANK * (PLAIN + VALUE)
            else:
                work = pairs * (ROTATED + 2 * RANK) + queries * RANK * (PLAIN + VALUE)
            moved = 2.0 * (heads * RANK * (PLAIN + VALUE) + total * (ROTATED + RANK))

            def form(row, q=q, pool=pool, plan=plan, own=own):  # type: ignore[no-untyped-def]
                return row.latent_attention(q, pool, plan, scale, own)

            kind = f"latent {name}, {queries} of {total}"
            yield kind, lambda form=form: form(ops), lambda form=form: form(reference), moved, 2.0 * heads * work

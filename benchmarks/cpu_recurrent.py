"""Subjects of the CPU kernel benchmark: recurrent layers at the sizes of real models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvferry.kernels.batch_plan import BatchPlan

if TYPE_CHECKING:
    import torch

    from kvferry.kernels.cpu import CpuOps

BATCHES = ((1, 1), (8, 1), (1, 512))
"""Sequences and query tokens of each."""
LAYERS = 24
"""Layers of a step, whose states exceed the caches."""
CHUNK = 32
"""Tokens of a chunk of the compiled kernels."""
RATES = ("scan 8192 x 16",)
"""Subjects that read a decay rate for each number of a state."""
Subject = tuple[str, Callable[[], object], float, float]
"""Title, a run of all layers, bytes of states that it moves, floating point operations of the chunked form."""


def state_plan(seqs: int, query_len: int, rows: torch.Tensor) -> BatchPlan:
    """Return a plan of equal sequences that read the first rows of states and write the others."""
    import torch

    from kvferry.kernels.sequence_state import SequenceStates

    states = SequenceStates(rows, torch.arange(seqs), torch.arange(seqs) + seqs)
    nothing, starts = torch.zeros(0, dtype=torch.int64), torch.arange(seqs + 1, dtype=torch.int32) * query_len
    lens = (query_len,) * seqs
    return BatchPlan(
        nothing, nothing, nothing, starts, nothing, lens, lens, seqs if query_len == 1 else 0, 16, states=states
    )


def recurrent_subjects(ops: CpuOps) -> Iterator[Subject]:
    """Yield the subjects: delta rule of Qwen3.5, scans of Granite 4 and Jamba, lightning attention and convolutions."""
    import torch

    from kvferry.engine.state_memory import make_rows

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape).bfloat16()

    def subject(
        kind: str,
        title: str,
        seqs: int,
        tokens: int,
        shape: tuple[int, ...],
        inputs: tuple[torch.Tensor | None, ...],
        work: float,
    ) -> Subject:
        size = int(torch.tensor(shape).prod())
        rows = make_rows(2 * seqs, LAYERS * size, torch.device("cpu"))  # a node's kind of memory
        plan = state_plan(seqs, tokens, rows)
        states = [rows[:, i * size : (i + 1) * size].view(len(rows), *shape) for i in range(LAYERS)]
        used = states if tokens == 1 else states[:1]
        options = {"silu": True} if kind == "causal_conv" else {}

        def run() -> None:
            for each in used:  # results are dropped as in a model: kept, each lies in pages that are new
                getattr(ops, kind)(*inputs, each, plan, **options)

        name = f"{title}, {seqs} decodes" if tokens == 1 else f"{title}, {tokens} tokens"
        moved = 8.0 * size * seqs + (4.0 * size if title in RATES else 0.0)
        return name, run, moved * len(used), work * seqs * tokens * len(used)

    inputs: tuple[torch.Tensor | None, ...]
    for seqs, tokens in BATCHES:
        count = seqs * tokens
        for title, k_heads, heads, dim in (("delta rule 16 x 128", 16, 16, 128), ("delta rule 32 x 128", 16, 32, 128)):
            q, k, v = random(count, k_heads, dim), random(count, k_heads, dim), random(count, heads, dim)
            inputs = (q, k, v, -torch.rand(count, heads), torch.rand(count, heads))
            work = 2.0 * heads * (3 * dim * dim + CHUNK * dim) + 2.0 * k_heads * CHUNK * dim
            yield subject("gated_delta_rule", title, seqs, tokens, (heads, dim, dim), inputs, work)
        scans = (("scan 48 x 64 x 128", 48, 64, 1, 128), ("lightning 64 x 128", 64, 128, 64, 128))
        for title, heads, dim, groups, n in scans:
            x, b, c = random(count, heads, dim), random(count, groups, n), random(count, groups, n)
            inputs = (x, torch.rand(count, heads), -torch.rand(heads), b, c, torch.rand(heads))
            work = 2.0 * heads * (2 * dim * n + CHUNK * dim / 2) + groups * CHUNK * n
            yield subject("state_space_scan", title, seqs, tokens, (heads, dim, n), inputs, work)
        x, b, c = random(count, 8192, 1), random(count, 1, 16), random(count, 1, 16)
        inputs = (x, torch.rand(count, 8192), -torch.rand(8192, 16), b, c, torch.rand(8192))
        yield subject("state_space_scan", "scan 8192 x 16", seqs, tokens, (8192, 1, 16), inputs, 6.0 * 8192 * 16)
        inputs = (random(count, 8192), random(8192, 4), random(8192))
        yield subject("causal_conv", "convolution 8192 x 4", seqs, tokens, (8192, 3), inputs, 8.0 * 8192)
        inputs = (random(count, 3 * 2048), random(2048, 3), None)
        yield subject("gated_conv", "gated convolution 2048 x 3", seqs, tokens, (2048, 2), inputs, 8.0 * 2048)

"""Runs one step: slices of requests to a batch plan, the model, and what was drawn from its logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.models.base import Model
from engine.sampler import Sampled, SampleRow, sample, score_prompt
from engine.scheduler import Slice
from kernels.plan import BatchPlan

SCORED_ROWS = 128
"""Rows of logits made at once for prompt log-probabilities (128 rows of a 128k vocabulary are 64 MiB)."""


def build_plan(slices: Sequence[Slice], block_size: int, device: torch.device) -> BatchPlan:
    """The plan of a batch; slices with one token stand first. Int arrays are built on the host and copied once."""
    tables = [np.asarray(s.request.block_ids, dtype=np.int32) for s in slices]
    table = np.zeros((len(slices), max(map(len, tables))), dtype=np.int32)
    for row, ids in zip(table, tables, strict=True):
        row[: len(ids)] = ids
    positions = np.concatenate([np.arange(s.start, s.start + s.count, dtype=np.int64) for s in slices])
    sequence = np.repeat(np.arange(len(slices)), [s.count for s in slices])
    slots = table[sequence, positions // block_size].astype(np.int64) * block_size + positions % block_size
    query_lens = tuple(s.count for s in slices)
    total_lens = tuple(s.start + s.count for s in slices)

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return BatchPlan(
        positions=put(positions),
        slots=put(slots),
        block_table=put(table),
        query_start=put(np.cumsum([0, *query_lens], dtype=np.int32)),
        total_len=put(np.asarray(total_lens, dtype=np.int32)),
        query_lens=query_lens,
        total_lens=total_lens,
        num_decodes=sum(n == 1 for n in query_lens),
        block_size=block_size,
    )


class Runner:
    """Joins a model and its KV pool. `kv` is [block, layer, 2, kv_head, slot, dim]."""

    def __init__(self, model: Model, kv: torch.Tensor, block_size: int) -> None:
        self.model = model
        self.kv = kv
        self.block_size = block_size

    @torch.inference_mode()
    def run(self, slices: Sequence[Slice]) -> list[Sampled | None]:
        """Compute the slices and draw the next token of each that samples (None for the others). On return their K/V is
        in the pool: the link may read it, which no stream orders (drawing tokens has waited for the device already)."""
        plan = build_plan(slices, self.block_size, self.model.device)
        token_ids = np.concatenate(
            [np.asarray(s.request.token_ids[s.start : s.start + s.count], dtype=np.int64) for s in slices]
        )
        hidden = self.model.forward(torch.from_numpy(token_ids).to(self.model.device), self.kv, plan)
        ends = np.cumsum(plan.query_lens)
        for s, end in zip(slices, ends, strict=True):
            if s.request.wants_prompt_logprobs:
                self._score(s, hidden[end - s.count : end])
        drawing = [i for i, s in enumerate(slices) if s.samples]
        drawn: list[Sampled | None] = [None] * len(slices)
        if drawing:
            last = torch.as_tensor([int(ends[i]) - 1 for i in drawing], device=hidden.device)
            rows = [_sample_row(slices[i]) for i in drawing]
            for i, result in zip(drawing, sample(self.model.logits(hidden[last]), rows), strict=True):
                drawn[i] = result
        elif hidden.is_cuda:
            torch.cuda.current_stream(hidden.device).synchronize()
        return drawn

    def _score(self, part: Slice, hidden: torch.Tensor) -> None:
        """Append the log-probabilities of the prompt tokens that follow this slice's positions."""
        request = part.request
        top = request.job.params.prompt_logprobs
        assert top is not None
        if part.start == 0:
            request.prompt_logprobs.append(None)
        following = request.token_ids[part.start + 1 : part.start + part.count + 1]
        for at in range(0, len(following), SCORED_ROWS):
            ids = following[at : at + SCORED_ROWS]
            request.prompt_logprobs.extend(score_prompt(self.model.logits(hidden[at : at + len(ids)]), ids, top))


def _sample_row(part: Slice) -> SampleRow:
    request = part.request
    return SampleRow(request.job.params, request.token_ids, request.job.prompt_len)

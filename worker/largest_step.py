"""Largest step of a model that the limits allow, run once to measure its memory before the KV pool exists."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvferry.engine.batch_planner import Part, lay_out
from kvferry.engine.budget import Limits
from kvferry.engine.models.base import Model
from kvferry.engine.runner import SCORED_ROWS
from kvferry.engine.sampler import SampleRow, sample
from kvferry.engine.scheduler import max_running
from kvferry.engine.state_memory import make_rows
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.graph_inputs import CAPTURED_ROWS, CHUNK_DECODES, CHUNK_TOKENS
from kvferry.kernels.input_staging import Staging
from kvferry.kernels.lora import Adapter
from kvferry.kernels.sequence_state import SequenceStates
from kvferry.protocol.layout import KVLayout
from kvferry.protocol.sampling import MAX_LOGPROBS, SamplingParams
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker.pool_memory import make_pool

GRAPH_BYTES = 8 << 20
"""Estimated bytes of one captured graph without its logits: the driver's copy of its launches, and small buffers."""
LARGEST_DRAW = SamplingParams(
    temperature=0.8,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    logprobs=MAX_LOGPROBS,
)
"""Sampling parameters whose drawing needs the most memory."""


@dataclass(frozen=True, slots=True)
class LargestStep:
    """Largest step of a model that the limits allow.

    layout: of the model's KV blocks. tokens: query tokens of the step. rows: of logits that are made at once."""

    model: Model
    layout: KVLayout
    tokens: int
    rows: int
    adapters: Sequence[Adapter] = ()

    @torch.inference_mode()
    def run(self) -> None:
        """Compute the tokens as prompts, on a pool of one block, and draw from the logits of some of them.

        All tokens share that block, so what they compute is meaningless. A graph of a step of up to 512 tokens may be
        captured; the first step on the node's own pool drops it."""
        kv = make_pool(self.layout, 1, self.model.device)
        token_ids, plan = self._plan()
        hidden = self.model.forward(token_ids, kv, plan)
        logits = self.model.logits(hidden[: self.rows])
        sample(logits, [SampleRow(LARGEST_DRAW, [1, 1], 1) for _ in range(len(logits))], self.model.ops)

    def graph_bytes(self) -> int:
        """Estimate the memory of all captured steps: those of decodes alone keep their logits."""
        count = min(bisect_left(CAPTURED_ROWS, self.rows) + 1, len(CAPTURED_ROWS))
        rows: int = sum(CAPTURED_ROWS[:count])
        graphs = count + len(CHUNK_TOKENS) * len(CHUNK_DECODES)
        return rows * self.model.info.vocab_size * 4 + graphs * GRAPH_BYTES

    def _plan(self) -> tuple[torch.Tensor, BatchPlan]:
        info, size = self.model.info, self.layout.block_size
        device = torch.device("cpu") if self.model.fed_by_host else self.model.device
        whole, rest = divmod(self.tokens, min(info.max_model_len, self.tokens))
        counts = [rest] * (rest > 0) + [min(info.max_model_len, self.tokens)] * whole
        parts = [Part([0] * -(-count // size), 0, count) for count in counts]
        adapted = {adapter: np.arange(self.tokens) for adapter in self.adapters[:1]}
        token_ids, plan = lay_out([1] * self.tokens, parts, size, Staging(device), adapted)
        return token_ids, self._with_memory(plan)

    def _with_memory(self, plan: BatchPlan) -> BatchPlan:
        """Return the plan with a row of recurrent state, and windows' tables, for a model that has such layers."""
        info, device = self.model.info, plan.positions.device
        if info.groups is not None:
            count = info.groups.count
            plan = plan.with_windows(plan.slots.expand(count, -1), plan.block_table.expand(count, -1, -1))
        if info.state_floats:
            rows, nobody = make_rows(plan.num_seqs, info.state_floats, self.model.device), [-1] * plan.num_seqs
            before, after = torch.tensor([nobody, list(range(plan.num_seqs))], device=device)
            plan = replace(plan, states=SequenceStates(rows, before, after))
        return plan


def largest_steps(
    settings: WorkerSettings,
    limits: Limits,
    target: tuple[Model, KVLayout],
    draft: tuple[Model | None, KVLayout | None],
    adapters: Sequence[Adapter],
) -> list[LargestStep]:
    """Return the largest step of the target model, then that of the draft model if there is one."""
    tokens, seqs = limits.max_num_batched_tokens, max_running(limits.max_num_seqs)
    rows = max(seqs * (1 + settings.num_speculative_tokens), SCORED_ROWS)
    steps = [LargestStep(*target, tokens, min(rows, tokens), adapters)]
    model, layout = draft
    if model is not None and layout is not None:
        tokens = draft_chunk(limits)
        steps.append(LargestStep(model, layout, tokens, min(seqs, tokens)))
    return steps


def draft_chunk(limits: Limits) -> int:
    """Return how many tokens of prompts a step of the draft model computes at most."""
    return max(1, limits.max_num_batched_tokens // 4)

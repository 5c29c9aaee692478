"""Runner: executes one step of the model over the KV pool and samples its tokens; StepRunner is its interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

import torch

from kvferry.engine.batch_planner import BatchPlanner, Part, lay_out
from kvferry.engine.grammar_masks import GrammarMasks
from kvferry.engine.inflight_step import InflightStep, Launch
from kvferry.engine.media.media_inputs import MediaInputs
from kvferry.engine.models.base import Computing, ForwardAbandoned, KeepGoing, Model, SuspendedPass
from kvferry.engine.pooling import Pooler, Read, take
from kvferry.engine.sample_rows import Outcome, by_slice, only_draws, sample_row, sample_rows
from kvferry.engine.sampler import Sampled, SampleRow, draw_plain, sample, score_prompt
from kvferry.engine.shared_cores.core_turns import CoreTurns
from kvferry.engine.state_inputs import StateInputs
from kvferry.engine.state_memory import StateMemory
from kvferry.engine.step_slices import Slice
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.decoder_step import always
from kvferry.kernels.input_staging import Staging
from kvferry.kernels.token_readback import Readback

SCORED_ROWS = 128
"""Rows of logits made at once for prompt log-probabilities (128 rows of a 128k vocabulary are 64 MiB)."""


MAX_WHOLE_TOKENS = 64
"""Limit of the tokens of a step that keeps the cores to its end; handing them over would take as long as the step."""


class StepRunner(Protocol):
    """Runner interface of the engine."""

    masks: GrammarMasks
    states: StateMemory | None

    @property
    def model(self) -> Computing:
        """Model that computes the steps."""

    @property
    def waited_s(self) -> float:
        """Return seconds of the last run in which other processes had the cores."""

    def mark_urgent(self) -> None:
        """Announce urgent work that follows soon. Thread-safe."""

    def copy_block(self, source: int, target: int) -> None:
        """Copy the K/V of block `source` to `target`."""

    @property
    def launch(self) -> Launch | None:
        """Return the function that launches steps of plain streams asynchronously; None if the device has no queue."""

    def run(
        self, slices: Sequence[Slice], keep_going: KeepGoing = always, halfway: SuspendedPass | None = None
    ) -> Sequence[Outcome]:
        """Compute the slices: see `Runner.run`."""


class Runner:
    """Model and its KV pool.

    `kv` is [block, layer, plane, kv_head, slot, dim]. Grammar masks are made while the model computes.

    pooler: reads vectors from prompts; core_turns: turns on shared cores; states: recurrent states, None for a model
    without recurrent layers; beside: the device runs asynchronously to the host, in submission order."""

    def __init__(
        self,
        model: Model,
        kv: torch.Tensor,
        block_size: int,
        masks: GrammarMasks | None = None,
        pooler: Pooler | None = None,
        core_turns: CoreTurns | None = None,
        states: StateMemory | None = None,
    ) -> None:
        self.model = model
        self.kv = kv
        self.states = states
        self.masks = masks or GrammarMasks.none("this node does not support grammars")
        self._pooler, self._core_turns = pooler or Pooler(), core_turns or CoreTurns()
        inputs = torch.device("cpu") if model.fed_by_host else model.device
        self.beside = inputs.type == "cuda"
        self._block_size = block_size
        self._staging = Staging(inputs)
        self._states = None if states is None else StateInputs(states.rows, Staging(inputs))
        groups = 0 if model.info.groups is None else model.info.groups.count
        self._planner = BatchPlanner(block_size, self._staging, self._states, MediaInputs(Staging(inputs)), groups)

    @property
    def waited_s(self) -> float:
        """Seconds that the last step waited for shared cores."""
        return self._core_turns.waited_s

    def mark_urgent(self) -> None:
        """Announce urgent work that follows soon. Thread-safe."""
        self._core_turns.mark_urgent()

    @torch.inference_mode()
    def copy_block(self, source: int, target: int) -> None:
        """Copy all K/V of a block, before anything that the next step writes."""
        self.model.copy_block(self.kv, source, target)

    @torch.inference_mode()
    def run(
        self, slices: Sequence[Slice], keep_going: KeepGoing = always, halfway: SuspendedPass | None = None
    ) -> Sequence[Outcome]:
        """Compute the slices and draw the next token of each that samples, or read its vector.

        The result is None for other slices, and where a grammar's mask is not ready. On return the K/V is in the pool,
        so the link may read it; drawing tokens has already waited for the device.

        Raises ForwardAbandoned once `keep_going()` is false; nothing more is written then, until the step
        continues from `halfway`."""
        whole = slices[0].streams or sum(part.count for part in slices) <= MAX_WHOLE_TOKENS
        urgent = any(part.request.job.newcomer and not part.request.output_len for part in slices)
        with self._core_turns.computing(keep_going, whole=whole, urgent=urgent) as keep_going:
            return self._run(slices, keep_going, halfway)

    def _run(self, slices: Sequence[Slice], keep_going: KeepGoing, halfway: SuspendedPass | None) -> Sequence[Outcome]:
        token_ids, plan = self._planner.plan(slices)
        if all(map(only_draws, slices)):
            logits = self.model.next_logits(token_ids, self.kv, plan)
            rows = [row for s in slices for row in sample_rows(s)]
            drawn = self._sample(logits.values, rows, logits.best)
            return drawn if len(rows) == len(slices) else by_slice(slices, drawn)
        try:
            hidden = self.model.forward(token_ids, self.kv, plan, keep_going, halfway)
        except ForwardAbandoned:
            self._wait()
            raise
        ends = list(accumulate(plan.query_lens))
        for s, end in zip(slices, ends, strict=True):
            if not s.request.generates:
                take(s, hidden[end - s.count : end])
            elif s.request.wants_prompt_logprobs:
                self._score(s, hidden[end - s.count : end])
        return self._draw(slices, plan, hidden)

    @property
    def launch(self) -> Launch | None:
        """Return the function that launches steps of plain streams, if the device runs asynchronously."""
        return self._launch if self.beside else None

    @torch.inference_mode()
    def _launch(self, slices: Sequence[Slice], behind: InflightStep | None) -> InflightStep:
        """Start drawing the next token of each slice and wait for nothing.

        The slices are decodes of plain streams: rows without masks, scores and banned words.

        behind: step in flight, row for row, that draws the input tokens of these slices, which the host does not know
        yet; the output that follows an undrawn token must not be used."""
        token_ids, plan = self._planner.plan(slices, None if behind is None else behind.rows)
        rows = [sample_row(part) for part in slices]
        if behind is not None:
            token_ids = behind.tokens[token_ids].clamp_(min=0)
            rows = [row.ahead(1, place) for row, place in zip(rows, behind.rows, strict=True)]
        logits = self.model.next_logits(token_ids, self.kv, plan).values
        drawn = None if behind is None else behind.tokens
        return InflightStep(Readback(draw_plain(logits, rows, self.model.ops, drawn)), range(len(rows)))

    @torch.inference_mode()
    def compute_logits(
        self,
        token_ids: Sequence[int],
        part: Part,
        rows: int,
        keep_going: KeepGoing = always,
        states: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """Compute a part of a sequence for a canary check.

        Return float32 logits [rows, vocab] after its last tokens, on the host. states: rows of the recurrent state to
        read and to write, for a model that has one.

        Raises ForwardAbandoned once `keep_going()` is false."""
        own = token_ids[part.start : part.start + part.count]
        ids, plan = lay_out(own, [part], self._block_size, self._staging)
        if states is not None:
            assert self._states is not None, "a model without recurrent layers has no states"
            plan = replace(plan, states=self._states.between(states[:1], states[1:]))
        with self._core_turns.computing(keep_going) as keep_going:
            try:
                hidden = self.model.forward(ids, self.kv, plan, keep_going)
                return self.model.logits(hidden[-rows:]).to("cpu", copy=True) if rows else torch.empty(0)
            finally:
                self._wait()

    def _draw(self, slices: Sequence[Slice], plan: BatchPlan, hidden: torch.Tensor) -> list[Sampled | Read | None]:
        """Draw for the slices that sample."""
        drawn: list[Sampled | Read | None] = [None] * len(slices)
        drawing = [i for i, s in enumerate(slices) if s.draws]
        reading = [i for i, s in enumerate(slices) if s.samples and not s.request.generates]
        if reading:
            for i, found in zip(reading, self._pooler.finish([slices[i].request for i in reading]), strict=True):
                drawn[i] = found
        if not drawing:
            self._wait()
            return drawn
        if len(drawing) < len(hidden):
            # A plan without row counts is of decodes: one token per slice.
            chosen = torch.tensor(drawing, device=hidden.device) if plan.drawing is None else plan.drawing
            hidden = hidden[chosen]
        rows = [sample_row(slices[i]) for i in drawing]
        for i, result in zip(drawing, self._sample(self.model.logits(hidden), rows), strict=True):
            drawn[i] = result
        return drawn

    def _sample(
        self, logits: torch.Tensor, rows: Sequence[SampleRow], best: Sequence[int] | None = None
    ) -> list[Sampled | None]:
        self.masks.settle([row.mask for row in rows if row.mask is not None])
        return sample(logits, rows, self.model.ops, best)

    def _wait(self) -> None:
        """Wait until the device has finished the submitted work."""
        if self.kv.is_cuda:
            torch.cuda.current_stream(self.kv.device).synchronize()

    def _score(self, part: Slice, hidden: torch.Tensor) -> None:
        """Append the log-probabilities of the prompt tokens that follow this slice's positions."""
        request = part.request
        top = request.job.params.prompt_logprobs
        assert top is not None
        if part.start == 0 and not request.prompt_logprobs:
            request.prompt_logprobs.append(None)
        following = request.token_ids[part.start + 1 : part.start + part.count + 1]
        for at in range(0, len(following), SCORED_ROWS):
            ids = following[at : at + SCORED_ROWS]
            request.prompt_logprobs.extend(score_prompt(self.model.logits(hidden[at : at + len(ids)]), ids, top))

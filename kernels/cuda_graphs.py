"""GraphStep: captures decode steps as CUDA graphs, one for each batch size, and replays them.

The host then only fills a few arrays per step."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.decoder_spec import DecoderForm
from kvferry.kernels.decoder_step import NextLogits, OneByOne, always
from kvferry.kernels.sequence_state import SequenceStates
from kvferry.protocol.layout import blocks_for

log = logging.getLogger("kvferry.kernels")

CAPTURED_ROWS = (1, 2, 4, *range(8, 129, 8))
"""Captured batch sizes. Batches between them are padded; larger ones run layer by layer."""
NOWHERE = -1
"""Slot of a padding row, whose K/V is not written, and the rows of its state, which begins with zeros."""
T = TypeVar("T")


class Capture(Protocol):
    """Recorder of device work for later replay on the same memory."""

    def __call__(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Return (replay, the value of `run`); each replay overwrites that value.

        A replay runs no Python of `run` and reads nothing from the host."""


class CudaCapture:
    """Capture by CUDA graphs that share one memory pool, since they never run at once. Raises RuntimeError."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # compile kernels and allocate workspaces outside of the graph
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Work of other threads on the device, such as the link's, is not captured.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = run()
        self._pool = graph.pool()
        return graph.replay, out


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Recorded step of one batch size. `replay` writes its results."""

    replay: Callable[[], None]
    hidden: torch.Tensor
    logits: torch.Tensor


class _Inputs:
    """Arrays that all graphs read, sized for the largest batch; the first `live` rows belong to the last step.

    states: rows of recurrent states; None for a model without recurrent layers. groups: of layers with windows."""

    def __init__(
        self,
        form: DecoderForm,
        block_size: int,
        device: torch.device,
        states: torch.Tensor | None = None,
        groups: int = 0,
    ) -> None:
        rows, self.longest, self.block_size = CAPTURED_ROWS[-1], len(form.cos), block_size
        self.ids, self.positions = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
        self.slots = torch.full((rows,), NOWHERE, dtype=torch.int64, device=device)
        self.total_len = torch.ones(rows, dtype=torch.int32, device=device)
        width = blocks_for(self.longest, block_size)
        self.table = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.window_slots = torch.full((groups, rows), NOWHERE, dtype=torch.int64, device=device)
        self.window_tables = torch.zeros(groups, rows, width, dtype=torch.int32, device=device)
        self.query_start = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.states = states
        self.before, self.after = (torch.full((rows,), NOWHERE, dtype=torch.int64, device=device) for _ in range(2))
        self._live = 0

    def plan(self, size: int) -> BatchPlan:
        """Return the plan of a batch of this size over these arrays.

        Its lengths are the longest, so launches suit any."""
        plan = BatchPlan(
            positions=self.positions[:size],
            slots=self.slots[:size],
            block_table=self.table[:size],
            query_start=self.query_start[: size + 1],
            total_len=self.total_len[:size],
            query_lens=(1,) * size,
            total_lens=(self.longest,) * size,
            num_decodes=size,
            block_size=self.block_size,
            states=None if self.states is None else SequenceStates(self.states, self.before[:size], self.after[:size]),
        )
        return plan.with_windows(self.window_slots[:, :size], self.window_tables[:, :size])

    def fill(self, token_ids: torch.Tensor, plan: BatchPlan) -> None:
        count, width = len(token_ids), min(plan.block_table.shape[1], self.table.shape[1])
        torch._foreach_copy_(
            [self.ids[:count], self.positions[:count], self.slots[:count], self.total_len[:count]],
            [token_ids, plan.positions, plan.slots, plan.total_len],
        )
        self.table[:count, :width].copy_(plan.block_table[:, :width])
        for group, own in enumerate(plan.windows):
            self.window_slots[group, :count].copy_(own.slots)
            self.window_tables[group, :count, :width].copy_(own.block_table[:, :width])
        if plan.states is not None:
            torch._foreach_copy_([self.before[:count], self.after[:count]], [plan.states.before, plan.states.after])
        if count < self._live:
            unused = slice(count, self._live)
            self.positions[unused], self.slots[unused], self.total_len[unused] = 0, NOWHERE, 1
            self.before[unused] = self.after[unused] = NOWHERE
            self.table[unused, 0] = 0
            self.window_slots[:, unused], self.window_tables[:, unused, 0] = NOWHERE, 0
        self._live = count


class GraphStep:
    """Implements `kernels.decoder_step.Step` for batches of decodes of any model and any kind of stored weights.

    one_by_one: runs the layers through the backend's operations, which may read a plan's host numbers only to choose
    their launches. A batch size is captured when it first occurs. If that fails, all batches run layer by layer."""

    def __init__(self, form: DecoderForm, one_by_one: OneByOne, capture: Capture) -> None:
        self._form, self._one_by_one, self._capture = form, one_by_one, capture
        self._kv: torch.Tensor | None = None
        self._inputs: _Inputs | None = None
        self._recorded: dict[int, _Recorded] = {}
        self._failed = False

    def takes(self, plan: BatchPlan, kv: torch.Tensor) -> bool:
        decodes = plan.num_decodes == plan.num_seqs <= CAPTURED_ROWS[-1]
        return decodes and not self._failed and max(plan.total_lens) <= len(self._form.cos)

    def __call__(
        self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan, keep_going: Callable[[], bool] = always
    ) -> torch.Tensor:
        recorded = self._replay(token_ids, kv, plan)
        if recorded is None:
            return self._one_by_one(token_ids, kv, plan)
        return recorded.hidden[: len(token_ids)]

    def logits(self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan) -> NextLogits:
        recorded = self._replay(token_ids, kv, plan)
        if recorded is None:
            return NextLogits(self._form.logits(self._one_by_one(token_ids, kv, plan)))
        return NextLogits(recorded.logits[: len(token_ids)])

    def _replay(self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan) -> _Recorded | None:
        """Return the step's results; None where it cannot be captured."""
        inputs, states = self._inputs, None if plan.states is None else plan.states.rows
        same = inputs is not None and kv is self._kv and inputs.states is states
        if inputs is None or not same or inputs.block_size != plan.block_size:
            self._recorded.clear()
            inputs = self._inputs = _Inputs(self._form, plan.block_size, kv.device, states, len(plan.windows))
            self._kv = kv
        inputs.fill(token_ids, plan)
        size = CAPTURED_ROWS[bisect_left(CAPTURED_ROWS, len(token_ids))]
        recorded = self._recorded.get(size)
        if recorded is None:
            recorded = self._record(inputs, size, kv)
        if recorded is not None:
            recorded.replay()
        return recorded

    def _record(self, inputs: _Inputs, size: int, kv: torch.Tensor) -> _Recorded | None:
        """Record the step; runs during capture write K/V where the replay will write it.

        Each run has a plan of its own: what operations derive from a plan once for all layers must be derived in each
        replay."""

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self._one_by_one(inputs.ids[:size], kv, inputs.plan(size))
            return hidden, self._form.logits(hidden)

        try:
            replay, (hidden, logits) = self._capture(run)
        except RuntimeError:
            log.warning("decode steps run layer by layer: one of %d rows cannot be captured", size, exc_info=True)
            self._failed = True
            self._recorded.clear()
            return None
        self._recorded[size] = _Recorded(replay, hidden, logits)
        return self._recorded[size]

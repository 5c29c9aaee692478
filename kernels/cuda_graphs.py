"""GraphStep: captures decode steps and steps with short prompt chunks as CUDA graphs, and replays them.

There is one graph for each padded size (`graph_inputs`). The host then only fills a few arrays per step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.decoder_spec import DecoderForm
from kvferry.kernels.decoder_step import NextLogits, OneByOne, always
from kvferry.kernels.graph_inputs import GraphInputs, GraphSize, captured_size

log = logging.getLogger("kvferry.kernels")

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
    """Recorded step of one size. `replay` writes its results; logits: None for a step with chunks."""

    replay: Callable[[], None]
    hidden: torch.Tensor
    logits: torch.Tensor | None


class _Graphs:
    """Recorded steps over one pool, of decodes alone or with chunks. A size is captured when it first occurs.

    kind: of the steps, for the log. If a capture fails, `failed` is set and all are dropped."""

    def __init__(self, form: DecoderForm, one_by_one: OneByOne, capture: Capture, kind: str, *, chunks: bool) -> None:
        self._form, self._one_by_one, self._capture = form, one_by_one, capture
        self._kind, self._chunks = kind, chunks
        self._kv: torch.Tensor | None = None
        self._inputs: GraphInputs | None = None
        self._hidden: torch.Tensor | None = None
        self.recorded: dict[GraphSize, _Recorded] = {}
        self.failed = False

    def replay(
        self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan, size: GraphSize
    ) -> tuple[_Recorded, slice] | None:
        """Return the step's results and the batch's rows of them; None where it cannot be captured."""
        inputs, states = self._inputs, None if plan.states is None else plan.states.rows
        same = inputs is not None and kv is self._kv and inputs.states is states
        if inputs is None or not same or inputs.block_size != plan.block_size:
            self.recorded.clear()
            longest, groups = len(self._form.cos), len(plan.windows)
            inputs = GraphInputs(longest, plan.block_size, kv.device, states, groups, chunks=self._chunks)
            self._inputs, self._kv = inputs, kv
        rows = inputs.fill(token_ids, plan, size)
        recorded = self.recorded.get(size) or self._record(inputs, size, kv)
        if recorded is None:
            return None
        recorded.replay()
        return recorded, rows

    def _record(self, inputs: GraphInputs, size: GraphSize, kv: torch.Tensor) -> _Recorded | None:
        """Record the step; runs during capture write K/V where the replay will write it.

        Each run has a plan of its own: what operations derive from a plan once for all layers must be derived in each
        replay."""

        def run() -> tuple[torch.Tensor, torch.Tensor | None]:
            hidden = self._one_by_one(inputs.ids[inputs.tokens(size)], kv, inputs.plan(size))
            return (self._kept(hidden, inputs), None) if self._chunks else (hidden, self._form.logits(hidden))

        try:
            replay, (hidden, logits) = self._capture(run)
        except RuntimeError:
            log.warning("%s run layer by layer: one of %s cannot be captured", self._kind, size, exc_info=True)
            self.failed = True
            self.recorded.clear()
            return None
        self.recorded[size] = _Recorded(replay, hidden, logits)
        return self.recorded[size]

    def _kept(self, hidden: torch.Tensor, inputs: GraphInputs) -> torch.Tensor:
        """Copy hidden states into an array that all graphs share, or each would keep memory for its own."""
        if self._hidden is None:
            self._hidden = hidden.new_empty(len(inputs.ids), hidden.shape[1])
        return self._hidden[: len(hidden)].copy_(hidden)


class GraphStep:
    """Implements `kernels.decoder_step.Step` for decodes and short chunks of any model and any kind of stored weights.

    one_by_one: runs the layers through the backend's operations, which may read a plan's host numbers only to choose
    their launches. chunks: also capture steps with prompt chunks. A size is captured when it first occurs. If that
    fails, all steps of its kind run layer by layer."""

    def __init__(self, form: DecoderForm, one_by_one: OneByOne, capture: Capture, *, chunks: bool = False) -> None:
        self._form, self._one_by_one, self._chunks = form, one_by_one, chunks
        self._decodes = _Graphs(form, one_by_one, capture, "decode steps", chunks=False)
        self._mixed = _Graphs(form, one_by_one, capture, "steps with chunks", chunks=True)

    @property
    def sizes(self) -> list[GraphSize]:
        """Captured sizes, in the order in which they occurred."""
        return [*self._decodes.recorded, *self._mixed.recorded]

    def takes(self, plan: BatchPlan, kv: torch.Tensor) -> bool:
        size = captured_size(plan)
        if size is None or max(plan.total_lens) > len(self._form.cos):
            return False
        return self._chunks and not self._mixed.failed if size.tokens else not self._decodes.failed

    def __call__(
        self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan, keep_going: Callable[[], bool] = always
    ) -> torch.Tensor:
        found = self._replay(token_ids, kv, plan)
        return self._one_by_one(token_ids, kv, plan) if found is None else found[0].hidden[found[1]]

    def logits(self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan) -> NextLogits:
        found = self._replay(token_ids, kv, plan)
        if found is not None and found[0].logits is not None:
            return NextLogits(found[0].logits[found[1]])
        hidden = self._one_by_one(token_ids, kv, plan) if found is None else found[0].hidden[found[1]]
        return NextLogits(self._form.logits(hidden))

    def _replay(self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan) -> tuple[_Recorded, slice] | None:
        size = captured_size(plan)
        assert size is not None, "see takes"
        return (self._mixed if size.tokens else self._decodes).replay(token_ids, kv, plan, size)

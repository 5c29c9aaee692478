"""GraphInputs: device arrays that captured steps read, and GraphSize, the padded sizes for which steps are captured."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.sequence_state import SequenceStates
from kvferry.protocol.layout import blocks_for

CAPTURED_ROWS = (1, 2, 4, *range(8, 129, 8))
"""Captured batch sizes of decodes alone. Batches between them are padded; larger ones run layer by layer."""
CHUNK_TOKENS = tuple(range(64, 513, 64))
"""Captured numbers of prompt tokens in a step with chunks. More tokens keep a device busy for longer than the host."""
CHUNK_DECODES = (0, 8, 16, 32, 64, 128)
"""Captured numbers of decodes beside chunks: multiples of 8, so that arrays begin at whole 16 bytes, as Triton's do."""
MAX_CHUNKS = 4
"""Maximum number of chunks in a captured step. Chunks that a batch lacks are empty sequences."""
NOWHERE = -1
"""Slot of a padding row, whose K/V is not written, and the rows of its state, which begins with zeros."""


@dataclass(frozen=True, slots=True)
class GraphSize:
    """Sizes of a captured step: rows of decodes, and prompt tokens of all its chunks; 0: decodes alone."""

    decodes: int
    tokens: int = 0

    @property
    def chunks(self) -> int:
        """Number of sequences with chunks."""
        return MAX_CHUNKS if self.tokens else 0


def captured_size(plan: BatchPlan) -> GraphSize | None:
    """Return the smallest captured size that holds the batch; None if none does."""
    decodes, chunks = plan.num_decodes, plan.num_seqs - plan.num_decodes
    if decodes > CAPTURED_ROWS[-1] or not plan.num_seqs:
        return None
    if not chunks:
        return GraphSize(CAPTURED_ROWS[bisect_left(CAPTURED_ROWS, decodes)])
    tokens = sum(plan.query_lens[decodes:])
    if chunks > MAX_CHUNKS or tokens > CHUNK_TOKENS[-1] or plan.see_until is not None:
        return None
    rows = CHUNK_DECODES[bisect_left(CHUNK_DECODES, decodes)]
    return GraphSize(rows, CHUNK_TOKENS[bisect_left(CHUNK_TOKENS, tokens)])


class GraphInputs:
    """Arrays of captured steps of one kind, sized for the largest; only the live range belongs to the last step.

    Decodes alone begin at row 0, with padding behind them. Beside chunks, decodes end at row `front`, with padding
    before them, and chunks begin there: so a batch's tokens lie together, and a step of any size is one range.

    longest: maximum length of a sequence. states: rows of recurrent states; None for a model without recurrent layers.
    groups: of layers with windows."""

    def __init__(
        self,
        longest: int,
        block_size: int,
        device: torch.device,
        states: torch.Tensor | None = None,
        groups: int = 0,
        *,
        chunks: bool = False,
    ) -> None:
        self.longest, self.block_size, self.states = longest, block_size, states
        self._front = CHUNK_DECODES[-1] if chunks else 0
        tokens = self._front + CHUNK_TOKENS[-1] if chunks else CAPTURED_ROWS[-1]
        seqs = self._front + MAX_CHUNKS if chunks else CAPTURED_ROWS[-1]
        self.ids, self.positions = (torch.zeros(tokens, dtype=torch.int64, device=device) for _ in range(2))
        self.slots = torch.full((tokens,), NOWHERE, dtype=torch.int64, device=device)
        self.total_len = torch.ones(seqs, dtype=torch.int32, device=device)
        width = blocks_for(longest, block_size)
        self.table = torch.zeros(seqs, width, dtype=torch.int32, device=device)
        self.window_slots = torch.full((groups, tokens), NOWHERE, dtype=torch.int64, device=device)
        self.window_tables = torch.zeros(groups, seqs, width, dtype=torch.int32, device=device)
        self.before, self.after = (torch.full((seqs,), NOWHERE, dtype=torch.int64, device=device) for _ in range(2))
        self._query_start = torch.arange(CAPTURED_ROWS[-1] + 1, dtype=torch.int32, device=device)
        self._chunk_starts = {
            rows: torch.arange(rows + MAX_CHUNKS + 1, dtype=torch.int32, device=device).clamp_(max=rows)
            for rows in (CHUNK_DECODES if chunks else ())
        }
        self._live = self._front, self._front, self._front
        """First row, end of the tokens and end of the sequences of the last step."""

    def tokens(self, size: GraphSize) -> slice:
        """Return the range of the step's tokens in `ids`."""
        return slice(*self._ends(size)[:2])

    def plan(self, size: GraphSize) -> BatchPlan:
        """Return the plan of a step of this size over these arrays.

        Its lengths are the longest, so launches suit any."""
        first, end_tokens, end_seqs = self._ends(size)
        tokens, seqs = slice(first, end_tokens), slice(first, end_seqs)
        empty = max(0, size.chunks - 1)
        plan = BatchPlan(
            positions=self.positions[tokens],
            slots=self.slots[tokens],
            block_table=self.table[seqs],
            query_start=self._chunk_starts[size.decodes] if size.tokens else self._query_start[: size.decodes + 1],
            total_len=self.total_len[seqs],
            query_lens=(1,) * size.decodes + ((size.tokens,) + (0,) * empty if size.tokens else ()),
            total_lens=(self.longest,) * (end_seqs - first),
            num_decodes=size.decodes,
            block_size=self.block_size,
            states=None if self.states is None else SequenceStates(self.states, self.before[seqs], self.after[seqs]),
        )
        return plan.with_windows(self.window_slots[:, tokens], self.window_tables[:, seqs])

    def fill(self, token_ids: torch.Tensor, plan: BatchPlan, size: GraphSize) -> slice:
        """Write the batch; return where its tokens lie among those of a step of this size."""
        count, width = len(token_ids), min(plan.block_table.shape[1], self.table.shape[1])
        first = self._front - plan.num_decodes if self._front else 0
        live = first, first + count, first + plan.num_seqs
        tokens, seqs = slice(first, live[1]), slice(first, live[2])
        torch._foreach_copy_(
            [self.ids[tokens], self.positions[tokens], self.slots[tokens], self.total_len[seqs]],
            [token_ids, plan.positions, plan.slots, plan.total_len],
        )
        self.table[seqs, :width].copy_(plan.block_table[:, :width])
        for group, own in enumerate(plan.windows):
            self.window_slots[group, tokens].copy_(own.slots)
            self.window_tables[group, seqs, :width].copy_(own.block_table[:, :width])
        if plan.states is not None:
            torch._foreach_copy_([self.before[seqs], self.after[seqs]], [plan.states.before, plan.states.after])
        if size.tokens:
            self._fill_starts(self._chunk_starts[size.decodes], plan, size)
        was, self._live = self._live, live
        if was[0] < first:
            self._clear(slice(was[0], first), slice(was[0], first))
        if was[1] > live[1] or was[2] > live[2]:
            self._clear(slice(live[1], max(live[1], was[1])), slice(live[2], max(live[2], was[2])))
        begin = self._ends(size)[0]
        return slice(first - begin, live[1] - begin)

    def _ends(self, size: GraphSize) -> tuple[int, int, int]:
        """Return the first row of a step, the end of its tokens and the end of its sequences."""
        if not self._front:
            return 0, size.decodes, size.decodes
        return self._front - size.decodes, self._front + size.tokens, self._front + size.chunks

    def _fill_starts(self, starts: torch.Tensor, plan: BatchPlan, size: GraphSize) -> None:
        """Write where chunks begin, behind rows of decodes that are padded; those that the batch lacks are empty."""
        decodes, end = plan.num_decodes, size.decodes + plan.num_seqs - plan.num_decodes + 1
        torch.add(plan.query_start[decodes:], size.decodes - decodes, out=starts[size.decodes : end])
        starts[end:] = size.decodes + sum(plan.query_lens[decodes:])

    def _clear(self, tokens: slice, seqs: slice) -> None:
        """Make rows of an earlier step padding."""
        self.positions[tokens], self.slots[tokens], self.total_len[seqs] = 0, NOWHERE, 1
        self.before[seqs] = self.after[seqs] = NOWHERE
        self.table[seqs, 0] = 0
        self.window_slots[:, tokens], self.window_tables[:, seqs, 0] = NOWHERE, 0

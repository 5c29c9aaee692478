"""BatchPlan: positions, cache slots, block tables and lengths of one step's tokens, shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from kvferry.kernels.lora import Adapted
from kvferry.kernels.media_rows import MediaRows
from kvferry.kernels.sequence_state import SequenceStates


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Positions, cache slots and attention ranges of a batch's tokens.

    A batch holds `num_seqs` sequences: first decodes (one query token each), then prefill chunks. Their T query tokens
    are concatenated. Query token j of sequence s has position computed_len[s] + j and attends to all positions up to
    its own (see `see_until`), or to the last `window` of them under a sliding window.

    positions     int64 [T]              position of each token
    slots         int64 [T]              slot of its K/V: block id * block_size + offset; negative: its K/V is not
                                         written, as for padding rows of recorded steps, or another process writes it
    block_table   int32 [num_seqs, max_blocks]  block ids, padded with 0
    query_start   int32 [num_seqs + 1]   offsets of the sequences' query tokens
    total_len     int32 [num_seqs]       tokens in the cache once this step's are written
    query_lens / total_lens              the same as Python ints, so that no kernel launch waits for the device
    num_decodes   number of sequences with one query token, at the front
    adapted       tokens that are computed with adapters, by adapter
    chained       consecutive decodes of one sequence, each with a row of the table: the K/V of all is written
                  before any of them attends
    drawing       int64 [n] or None      tokens after which the next ones are drawn, if known beforehand
    last          sequences whose last token's hidden state is read; no others are read. None: all tokens' are read
    states        recurrent states of the sequences; None for a model without recurrent layers
    media         rows of media in place of some tokens' embeddings; None: every token is embedded by its id
    rope_positions  int64 [3, T], rotary positions by time, height and width, all equal for tokens without media; None:
                    all three are `positions`
    see_until     int32 [T], last position that each token of a chunk attends to, its own or a later one of the same
                  chunk, also in layers with a sliding window (Gemma 3 within an image); None: its own
    windows       plans of layers with windows, by group (`protocol.layer_groups`): they differ in slots and tables, and
                  entries of a table before a window may name any block; empty: all layers have these
    batch         identity of the batch, shared by its plans
    """

    positions: torch.Tensor
    slots: torch.Tensor
    block_table: torch.Tensor
    query_start: torch.Tensor
    total_len: torch.Tensor
    query_lens: tuple[int, ...]
    total_lens: tuple[int, ...]
    num_decodes: int
    block_size: int
    adapted: tuple[Adapted, ...] = ()
    chained: bool = False
    drawing: torch.Tensor | None = None
    last: tuple[int, ...] | None = None
    states: SequenceStates | None = None
    media: MediaRows | None = None
    rope_positions: torch.Tensor | None = None
    see_until: torch.Tensor | None = None
    windows: tuple[BatchPlan, ...] = ()
    batch: object = field(default_factory=object, compare=False)

    def of_group(self, group: int | None) -> BatchPlan:
        """Return the plan of a group of layers with windows; None: of the layers that attend to all tokens."""
        return self if group is None else self.windows[group]

    def with_windows(self, slots: torch.Tensor, tables: torch.Tensor) -> BatchPlan:
        """Return this plan with those of its groups: slots int64 [groups, T], tables int32 [groups, num_seqs, ..]."""
        own = [replace(self, slots=each, block_table=table) for each, table in zip(slots, tables, strict=True)]
        return replace(self, windows=tuple(own))

    @property
    def num_seqs(self) -> int:
        """Number of sequences."""
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """Number of query tokens."""
        return sum(self.query_lens)

    def of_last(self) -> tuple[torch.Tensor, BatchPlan]:
        """Return the tokens int64 [n] whose hidden states are read, by `last`, and the plan of these as decodes."""
        assert self.last is not None
        ends, count = list(accumulate(self.query_lens)), len(self.last)
        tokens, seqs = torch.tensor([[ends[seq] - 1 for seq in self.last], self.last], device=self.positions.device)
        return tokens, replace(
            self,
            positions=self.positions[tokens],
            slots=self.slots[tokens],
            block_table=self.block_table[seqs],
            query_start=torch.arange(count + 1, dtype=torch.int32, device=tokens.device),
            total_len=self.total_len[seqs],
            query_lens=(1,) * count,
            total_lens=tuple(self.total_lens[seq] for seq in self.last),
            num_decodes=count,
            drawing=None,
            last=None,
            media=None,
            see_until=None,
            windows=tuple(each.of_last()[1] for each in self.windows),
            batch=object(),
        )

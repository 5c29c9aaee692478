"""Batch plan: positions, slots and block tables of one step, shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvferry.kernels.lora import Adapted


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Positions, cache slots and attention ranges of a batch's tokens.

    A batch holds `num_seqs` sequences: first decodes (one query token each), then prefill chunks. Their T query tokens
    are concatenated. Query token j of sequence s has position computed_len[s] + j and attends to all positions up to
    its own, or to the last `window` of them under a sliding window.

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

    @property
    def num_seqs(self) -> int:
        """Number of sequences."""
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """Number of query tokens."""
        return sum(self.query_lens)

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,attr-defined"
"""Triton kernels for logit adjustments of a whole batch in two launches (`Ops.adjust`), without a device sync.

The device counts tokens: a table has a row of the vocabulary for each request with penalties. A step brings the new
tokens, or the place on the device of the one that the host does not know yet."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch
import triton
import triton.language as tl

from kvferry.kernels.input_staging import Staging
from kvferry.kernels.logit_adjustments import Adjusted, Adjustments

_TILE = 4096
_BLOCK = 128
_SEEN = tl.constexpr(-(1 << 31))
_MIN_ROWS = 8
"""Rows of the table at first."""
COLUMNS = 10
"""32-bit numbers per adjusted row.

They are: row of the logits; row of counts, -1 for none; repetition, frequency and presence penalty; offset of its
numbers after the rows; number of new prompt tokens and of new output tokens; number of additions; index of the drawn
token that is new, too, -1 for none."""


@triton.jit(do_not_specialize=["count", "vocab", "stride_row"])
def note_kernel(logits, counts, table, drawn, count, vocab, stride_row, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (adjusted row): add to its logits, and count its new tokens.

    After the table's rows [count, COLUMNS] come its new tokens, the prompt's first, then the tokens with additions,
    then the additions."""
    own = table + tl.program_id(0) * COLUMNS
    row, place = tl.load(own).to(tl.int64), tl.load(own + 1).to(tl.int64)
    prompt, output, added = tl.load(own + 6), tl.load(own + 7), tl.load(own + 8)
    numbers = table + count * COLUMNS + tl.load(own + 5)
    for start in range(0, prompt + output, BLOCK):
        at = start + tl.arange(0, BLOCK)
        token = tl.load(numbers + at, mask=at < prompt + output, other=vocab)
        mine = counts + place * vocab + token
        tl.atomic_or(mine, tl.full([BLOCK], _SEEN, tl.int32), mask=(at < prompt) & (token < vocab))
        tl.atomic_add(mine, 1, mask=(at >= prompt) & (token < vocab))
    behind = tl.load(own + 9)
    if behind >= 0:
        token = tl.load(drawn + behind)
        tl.atomic_add(counts + place * vocab + token, 1, mask=(token >= 0) & (token < vocab))
    numbers += prompt + output
    for start in range(0, added, BLOCK):
        at = start + tl.arange(0, BLOCK)
        token = tl.load(numbers + at, mask=at < added, other=vocab)
        value = tl.load(logits + row * stride_row + token, mask=token < vocab, other=0.0)
        more = tl.load(numbers + added + at, mask=at < added, other=0).to(tl.float32, bitcast=True)
        tl.store(logits + row * stride_row + token, value + more, mask=token < vocab)


@triton.jit
def penalise_kernel(logits, counts, table, vocab, stride_row, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """Program (adjusted row, tile of the vocabulary): apply the penalties."""
    own = table + tl.program_id(0) * COLUMNS
    row, place = tl.load(own).to(tl.int64), tl.load(own + 1).to(tl.int64)
    if place >= 0:
        repetition = tl.load(own + 2).to(tl.float32, bitcast=True)
        frequency = tl.load(own + 3).to(tl.float32, bitcast=True)
        presence = tl.load(own + 4).to(tl.float32, bitcast=True)
        at = tl.program_id(1) * TILE + tl.arange(0, TILE)
        word = tl.load(counts + place * vocab + at, mask=at < vocab, other=0)
        where = logits + row * stride_row + at
        value = tl.load(where, mask=(at < vocab) & (word != 0), other=0.0)
        less, more = tl.div_rn(value, tl.zeros_like(value) + repetition), value * repetition
        value = tl.where(repetition > 1.0, tl.minimum(less, more), tl.maximum(less, more))
        often = word & 0x7FFFFFFF
        value -= tl.where(often > 0, often.to(tl.float32) * frequency + presence, 0.0)
        tl.store(where, value, mask=(at < vocab) & (word != 0))


@dataclass(slots=True)
class _Place:
    """Device state of one request's adjustments.

    row: of the counts, -1 for none. upto: number of tokens counted. additions: by whether the output is too short to
    end."""

    row: int
    upto: int
    additions: dict[bool, np.ndarray] = field(default_factory=dict)


class Adjuster:
    """Logit adjustments on one device for one vocabulary size.

    A request's counts are freed when its adjustments are garbage-collected, on any thread. Otherwise not thread-safe.
    """

    def __init__(self, device: torch.device, vocab: int) -> None:
        self._vocab, self._staging = vocab, Staging(device)
        self._counts = torch.zeros(_MIN_ROWS, vocab, dtype=torch.int32, device=device)
        self._free = list(range(_MIN_ROWS))
        self._places: WeakKeyDictionary[Adjustments, _Place] = WeakKeyDictionary()

    def __call__(self, logits: torch.Tensor, rows: Sequence[Adjusted], drawn: torch.Tensor | None = None) -> None:
        """Implement `Ops.adjust`."""
        counted = [(self._place(each.adjustments), _known(each) + (each.behind >= 0)) for each in rows]
        (table,) = self._staging.put([self._table(rows)])
        count, stride = len(rows), logits.stride(0)
        note_kernel[(count,)](
            logits, self._counts, table, table if drawn is None else drawn,
            count, self._vocab, stride, COLUMNS=COLUMNS, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
        for place, upto in counted:  # now that they are counted: a step that fails earlier is repeated
            place.upto = upto
        if any(each.adjustments.counting for each in rows):
            penalise_kernel[(count, triton.cdiv(self._vocab, _TILE))](
                logits, self._counts, table, self._vocab, stride, COLUMNS=COLUMNS, TILE=_TILE, num_warps=8
            )

    def _table(self, rows: Sequence[Adjusted]) -> np.ndarray:
        """Return the table, int32, flat: see `COLUMNS`."""
        floats = np.zeros((len(rows), COLUMNS), dtype=np.float32)
        table, parts, begin = floats.view(np.int32), [], 0
        for i, (row, adjustments, output_len, behind) in enumerate(rows):
            place, params = self._place(adjustments), adjustments.params
            prompt = output = 0
            table[i, 9] = -1
            if place.row >= 0:
                table[i, 9] = behind
                self._forget_unknown(place, adjustments)
                new = adjustments.token_ids[place.upto :]
                prompt = min(len(new), max(0, adjustments.prompt_len - place.upto))
                output = len(new) - prompt
                parts.append(np.array(new, dtype=np.int32))
            added = self._additions(place, adjustments, output_len)
            parts.append(added)
            table[i, :2], floats[i, 2] = (row, place.row), params.repetition_penalty
            floats[i, 3:5] = params.frequency_penalty, params.presence_penalty
            table[i, 5:9] = begin, prompt, output, len(added) // 2
            begin += prompt + output + len(added)
        return np.concatenate([table.reshape(-1), *parts])

    def _additions(self, place: _Place, adjustments: Adjustments, output_len: int) -> np.ndarray:
        """Return int32: distinct tokens, then the bits of their additions."""
        early = output_len < adjustments.params.min_tokens
        if early not in place.additions:
            found: dict[int, float] = {}
            for token, added in adjustments.additions(output_len, self._vocab):
                found[token] = found.get(token, 0.0) + added
            sums = np.array([*found.values()], dtype=np.float32).view(np.int32)
            place.additions[early] = np.concatenate([np.array([*found], dtype=np.int32), sums])
        return place.additions[early]

    def _place(self, adjustments: Adjustments) -> _Place:
        place = self._places.get(adjustments)
        if place is None:
            row = self._take() if adjustments.counting else -1
            place = self._places[adjustments] = _Place(row, _first(adjustments))
            if row >= 0:
                finalize(adjustments, self._free.append, row)
        return place

    def _forget_unknown(self, place: _Place, adjustments: Adjustments) -> None:
        """Reset the counts if a token of a step that failed was counted."""
        if place.upto > max(len(adjustments.token_ids), _first(adjustments)):
            self._counts[place.row].zero_()
            place.upto = _first(adjustments)

    def _take(self) -> int:
        """Return a row of the counts, all zero."""
        if not self._free:
            more = torch.zeros_like(self._counts)
            self._free.extend(range(len(self._counts), 2 * len(self._counts)))
            self._counts = torch.cat((self._counts, more))
        row = self._free.pop()
        self._counts[row].zero_()
        return row


def _first(adjustments: Adjustments) -> int:
    """Return the first token that is counted."""
    return 0 if adjustments.params.repetition_penalty != 1.0 else adjustments.prompt_len


def _known(adjusted: Adjusted) -> int:
    """Return tokens of its request that the host knows."""
    return len(adjusted.adjustments.token_ids)

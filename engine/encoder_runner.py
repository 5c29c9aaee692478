"""Runner of encoder models: batches whole texts by length and computes embeddings or class scores, without a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvferry.engine.grammar_masks import GrammarMasks
from kvferry.engine.models.base import ForwardAbandoned, KeepGoing, SuspendedPass
from kvferry.engine.models.hf_encoder import EncoderModel, Text
from kvferry.engine.pooling import Pooler, Read, read, take
from kvferry.engine.state_memory import StateMemory
from kvferry.engine.step_slices import Slice
from kvferry.kernels.decoder_step import always
from kvferry.protocol.work import Classify, Embed

SHORTEST = 0.5
"""Shortest text of a batch as a share of its longest: each takes the time of the longest."""
PADDED_TOKENS = 16_384
"""Limit of a batch's padded tokens, unless it is one text."""


class EncoderRunner:
    """Runner of an encoder and a pooler, without a cache: each slice is a whole text."""

    waited_s = 0.0
    launch = None
    states: StateMemory | None = None

    def __init__(self, model: EncoderModel, pooler: Pooler) -> None:
        self.model = model
        self.masks = GrammarMasks.none("an encoder does not generate")
        self._pooler = pooler

    def mark_urgent(self) -> None:
        """Do nothing: it has the cores for as long as it computes."""

    def copy_block(self, source: int, target: int) -> None:
        """Raise AssertionError: there are no blocks."""
        raise AssertionError("an encoder has no KV blocks to copy")

    @torch.inference_mode()
    def run(
        self, slices: Sequence[Slice], keep_going: KeepGoing = always, halfway: SuspendedPass | None = None
    ) -> list[Read | None]:
        """Return the answer to each slice. Raises ForwardAbandoned once `keep_going()` is false."""
        texts = [_text(part) for part in slices]
        found: list[Read | None] = [None] * len(slices)
        for batch in batches([len(text.token_ids) for text in texts]):
            if not keep_going():
                raise ForwardAbandoned
            answers = self._answers([slices[i] for i in batch], [texts[i] for i in batch])
            for index, answer in zip(batch, answers, strict=True):
                found[index] = answer
        return found

    def _answers(self, slices: Sequence[Slice], texts: Sequence[Text]) -> Sequence[Read | None]:
        if isinstance(slices[0].request.job.work, Classify):
            return [read(logits) for logits in self.model.logits(texts).cpu()]
        hidden = self.model.hidden(texts)
        if not isinstance(slices[0].request.job.work, Embed):
            return [None] * len(slices)
        for part, rows in zip(slices, hidden, strict=True):
            take(part, rows[: part.count])
        return self._pooler.finish([part.request for part in slices])


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield indices of texts in batches, longest texts first, none much shorter than the longest of its batch."""
    batch: list[int] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        full = batch and (lengths[index] < SHORTEST * longest or (len(batch) + 1) * longest > PADDED_TOKENS)
        if full or not batch:
            if batch:
                yield batch
            batch, longest = [], lengths[index]
        batch.append(index)
    if batch:
        yield batch


def _text(part: Slice) -> Text:
    work = part.request.job.work
    ids = part.request.token_ids[part.start : part.start + part.count]
    return Text(ids, work.second_from if isinstance(work, Classify) else 0)

"""Sequences of a model whose prompts may hold media, and the chunks in which such prompts are computed."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch

from kvferry.engine.media.encoder import MediaEncoder
from kvferry.engine.media.loader import load_media_encoder
from kvferry.engine.models import load_model
from kvferry.engine.models.base import Model
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.media_rows import MediaRows
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.source import resolve
from kvferry.protocol.media import RenderedPrompt
from tests.engine.tiny_models import Cache

CPU = torch.device("cpu")
OPS: tuple[type[Ops], ...] = (ReferenceOps, CpuOps) if instruction_set() else (ReferenceOps,)


class MediaCache(Cache):
    """Sequences whose prompts may hold media. prompts: by sequence, rendered."""

    def __init__(self, model: Model, encoder: MediaEncoder, prompts: dict[str, RenderedPrompt]) -> None:
        super().__init__(model)
        self.encoder, self.prompts = encoder, prompts
        with torch.inference_mode():
            self.rows_of = {name: encoder.encode(prompt.media) for name, prompt in prompts.items()}
        self.rope = {name: encoder.rope_positions(each.token_ids, each.media) for name, each in prompts.items()}

    def planned(self, plan: BatchPlan, batch: dict[str, torch.Tensor]) -> BatchPlan:
        rope, until = plan.positions.repeat(3, 1), plan.positions.int()
        tokens, rows = [], []
        for name, first, count in zip(batch, accumulate(plan.query_lens, initial=0), plan.query_lens, strict=False):
            start = self.computed[name] - count
            if (own := self.rope.get(name)) is not None:
                shift = int(own.max()) + 1 - own.shape[1]
                later = own[:, start : start + count]
                rope[:, first : first + count] += shift
                rope[:, first : first + later.shape[1]] = later
            for item, found in zip(self.prompts[name].media, self.rows_of[name], strict=True):
                begin, end = max(start, item.offset), min(start + count, item.offset + item.length)
                if begin < end:
                    tokens.append(torch.arange(begin, end) - start + first)
                    rows.append(found[begin - item.offset : end - item.offset])
                    until[first + begin - start : first + end - start] = item.offset + item.length - 1
        shifted = any(each is not None for each in self.rope.values())
        return replace(
            plan,
            media=MediaRows(torch.cat(tokens), torch.cat(rows)) if rows else None,
            rope_positions=rope if shifted else None,
            see_until=until if rows and self.encoder.bidirectional else None,
        )


def loaded(path: Path, ops: type[Ops], dtype: torch.dtype = torch.float32) -> tuple[Model, MediaEncoder]:
    """A model and the encoder of its media."""
    source = resolve(str(path))
    encoder = load_media_encoder(source, dtype=dtype, device=CPU)
    assert encoder is not None
    return load_model(source, device=CPU, dtype=dtype, ops=ops()), encoder


def chunks_of(prompt: RenderedPrompt, longest: int, whole: bool) -> list[int]:
    """Lengths of chunks of a prompt, which end behind an image rather than in it if it is to be whole."""
    ends, total = [], len(prompt.token_ids)
    while not ends or ends[-1] < total:
        end = min((ends[-1] if ends else 0) + longest, total)
        for item in prompt.media if whole else ():
            if item.offset < end < item.offset + item.length:
                end = item.offset + item.length
        ends.append(end)
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]

"""A device that computes beside its host, as late as it may: what it is given waits until somebody waits for it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from kvferry.engine.inflight_step import InflightStep
from kvferry.engine.models.base import KeepGoing, SuspendedPass
from kvferry.engine.runner import Runner
from kvferry.engine.sample_rows import Outcome
from kvferry.engine.sampler import SampleRow, draw_plain
from kvferry.engine.step_slices import Slice
from kvferry.kernels.decoder_step import always
from kvferry.kernels.token_readback import Readback

POISON = -1000


class Eager(Runner):
    """Launches as on a GPU; each is computed at once."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.beside = True
        self.launched = self.behind = 0
        self.streams: list[int] = []

    def _launch(self, slices: Sequence[Slice], behind: InflightStep | None) -> InflightStep:
        self.launched += 1
        self.behind += behind is not None
        self.streams.append(len(slices))
        return super()._launch(slices, behind)


class Late(Readback):
    """POISON until `compute` was called, by who waits for it or earlier."""

    def __init__(self, count: int, stream: Stream, compute: Callable[[], torch.Tensor]) -> None:
        super().__init__(torch.full((count,), POISON))
        self._stream, self._compute = stream, compute
        stream.queue.append(self)

    def compute(self) -> None:
        self.values.copy_(self._compute())

    def wait(self) -> list[int]:
        while self in self._stream.queue:
            self._stream.next()
        found = super().wait()
        assert POISON not in found
        return found


class Stream:
    """What a device was given and has not done."""

    def __init__(self) -> None:
        self.queue: deque[Late] = deque()

    def next(self) -> None:
        self.queue.popleft().compute()

    def drain(self) -> None:
        while self.queue:
            self.next()


class Lazy(Eager):
    """What is launched is computed when it is waited for, or when `chance` has it. Its inputs are what they were when
    it was launched; those of the streams behind it are read as it is computed."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)
        self.stream = Stream()
        self.chance = random.Random(0)

    def _launch(self, slices: Sequence[Slice], behind: InflightStep | None) -> InflightStep:
        self.launched += 1
        self.behind += behind is not None
        self.streams.append(len(slices))
        while self.stream.queue and self.chance.random() < 0.2:
            self.stream.next()
        token_ids, plan = self._planner.plan(slices, None if behind is None else behind.rows)
        ids = token_ids.clone()
        copied: dict[str, Any] = {f.name: _copy(getattr(plan, f.name)) for f in fields(plan)}
        plan = replace(plan, **copied)
        rows = [SampleRow(s.request.job.params, [*s.request.token_ids], s.request.job.prompt_len) for s in slices]
        if behind is not None:
            rows = [row.ahead(1, place) for row, place in zip(rows, behind.rows, strict=True)]

        @torch.inference_mode()
        def compute() -> torch.Tensor:
            known = ids if behind is None else behind.tokens[ids].clamp(min=0)
            assert POISON not in known.tolist()
            drawn = None if behind is None else behind.tokens
            return draw_plain(self.model.next_logits(known, self.kv, plan).values, rows, self.model.ops, drawn)

        return InflightStep(Late(len(slices), self.stream, compute), range(len(slices)))

    def run(
        self, slices: Sequence[Slice], keep_going: KeepGoing = always, halfway: SuspendedPass | None = None
    ) -> Sequence[Outcome]:
        self.stream.drain()
        return super().run(slices, keep_going, halfway)

    def copy_block(self, source: int, target: int) -> None:
        self.stream.drain()
        super().copy_block(source, target)


def _copy(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value
